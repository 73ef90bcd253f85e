"""SwigluFfn: the dense feed-forward block. A mixture of experts will be another class with the same `forward`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import silu
from forkpoint.kernels.matmul.naive import linear


class SwigluFfn:
    """down(silu(gate(x)) · up(x)); `weights` holds the tensors under their published names after `mlp.`."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.gate_up = torch.cat([weights["gate_proj.weight"], weights["up_proj.weight"]])
        self.down = weights["down_proj.weight"]

    def forward(self, x: Tensor) -> Tensor:
        """Rows [R, hidden] (normed) to rows [R, hidden]."""
        gate, up = linear(x, self.gate_up).chunk(2, dim=1)
        return linear(silu(gate) * up, self.down)
