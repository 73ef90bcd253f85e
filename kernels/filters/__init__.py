"""Top-k, top-p and min-p as one threshold key a row."""
