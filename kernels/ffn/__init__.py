"""Elementwise parts of the feed-forward layer in Triton; the definition is silu(gate) * up."""
