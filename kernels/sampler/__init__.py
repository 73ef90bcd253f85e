"""Sampling by integer decisions: naive.py defines it, a Triton twin goes beside it."""
