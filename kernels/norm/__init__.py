"""Row norms: naive.py defines them, Triton twins go beside it."""
