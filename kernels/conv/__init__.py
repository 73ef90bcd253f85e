"""The short causal convolution with its live ring and grid tail: naive.py defines it, a Triton twin goes beside it."""
