"""SwigluFfn: the dense feed-forward block. A mixture of experts will be another class with the same `forward`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from forkpoint.model.kernels import Kernels


class SwigluFfn:
    """down(silu(gate(x)) · up(x)); `weights` holds the tensors under their published names after `mlp.`."""

    def __init__(self, weights: Mapping[str, Tensor], kernels: Kernels) -> None:
        self.kernels = kernels
        self.gate_up = torch.cat([weights["gate_proj.weight"], weights["up_proj.weight"]])
        self.down = weights["down_proj.weight"]

    def forward(self, x: Tensor) -> Tensor:
        """Rows [R, hidden] (normed) to rows [R, hidden]."""
        gate, up = self.kernels.linear(x, self.gate_up).chunk(2, dim=1)
        return self.kernels.linear(self.kernels.swiglu(gate, up), self.down)
