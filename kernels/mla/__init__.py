"""Multi-head latent attention over pages: naive.py defines it, a Triton twin goes beside it."""
