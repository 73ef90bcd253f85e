"""Benchmarks: `python -m benchmarks.NAME` writes `benchmarks/results/NAME.jsonl`. No test asserts a time."""
