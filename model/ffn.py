"""GluFfn: the dense feed-forward block."""

import torch
from torch import Tensor

from forkpoint.kernels.ffn.activation import Activation
from forkpoint.model.kernels import Kernels
from forkpoint.model.table import WeightTable


class GluFfn:
    """down(act(gate(x), up(x))); `weights` holds the tensors under their published names after `mlp.`."""

    def __init__(self, weights: WeightTable, activation: Activation, kernels: Kernels) -> None:
        self.kernels, self.activation = kernels, activation
        self.gate_up = torch.cat([weights["gate_proj.weight"], weights["up_proj.weight"]])
        self.down = weights["down_proj.weight"]

    def forward(self, x: Tensor) -> Tensor:
        """Rows [R, hidden] (normed) to rows [R, hidden]."""
        gate, up = self.kernels.linear(x, self.gate_up).chunk(2, dim=1)
        return self.kernels.linear(self.kernels.glu(gate, up, self.activation), self.down)
