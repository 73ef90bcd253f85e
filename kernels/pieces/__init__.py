"""Products of few outputs and a long sum, cut in pieces that are added in ascending order."""
