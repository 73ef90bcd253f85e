"""The experts of a mixture: grouped products, dense or MXFP4, and their weighted sum."""
