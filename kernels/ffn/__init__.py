"""Elementwise parts of the feed-forward layer: gated activations, plain torch and Triton."""
