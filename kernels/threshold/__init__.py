"""The lowest key of a row that passes top-k, top-p and min-p."""
