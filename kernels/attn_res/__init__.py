"""Attention Residuals: a layer's input as a softmax mixture of earlier blocks' sums."""
