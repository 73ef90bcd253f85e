"""Matrix products whose bits do not depend on the batch: naive.py defines them, Triton twins go beside it."""
