"""Percentiles of few samples."""


def percentile(samples: list[float], share: float) -> float:
    """The nearest-rank percentile, `share` in [0, 1]."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
