"""Top-k, top-p and min-p: which keys of a row may be the last that pass."""
