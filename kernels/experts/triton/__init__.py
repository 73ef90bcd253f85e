"""The experts in Triton: rows sorted by expert, grouped products, and their weighted sum."""
