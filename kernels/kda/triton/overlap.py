"""Two streams: what comes first for one part runs beside what comes second for the part before it.

A layer's kernels come in pairs, one bound by latency or arithmetic and one by memory or its serial chain: side by side
they take little longer than the longer one. The order that matters is kept by events, so no bit depends on timing.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch

Work = Callable[[], None]


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """For first and second works. The second are ahead in priority: the chain through the parts is theirs."""
    return torch.cuda.Stream(device, priority=0), torch.cuda.Stream(device, priority=-1)


def overlapped(parts: Sequence[tuple[Work, Work]], device: torch.device) -> None:
    """Runs each part's first work, then its second, which also comes after the second works of earlier parts.

    First works may begin as soon as those before them are done. All follow what the current stream holds, and it
    follows them, so tensors of the current stream may be used and freed as if it had done the work. Works can be
    captured in a CUDA graph.
    """
    if device.type != "cuda" or len(parts) == 1:
        for first, second in parts:
            first()
            second()
        return
    current = torch.cuda.current_stream(device)
    ahead, behind = _streams(device)
    ahead.wait_stream(current)
    behind.wait_stream(current)
    for first, second in parts:
        with torch.cuda.stream(ahead):
            first()
        behind.wait_stream(ahead)
        with torch.cuda.stream(behind):
            second()
    current.wait_stream(behind)
