"""The gated activations in plain torch: elementwise, from operations whose bits depend on nothing but their operand."""

from torch import Tensor

from forkpoint.kernels.elementwise import sigmoid, silu, tanh
from forkpoint.kernels.ffn.activation import Activation


def glu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The activation of gate [..., F] and up [..., F], fp32 or fp64: [..., F]."""
    if activation.name == "silu":
        return silu(gate) * up
    opening = tanh(gate / activation.beta) * activation.beta * sigmoid(gate)
    if activation.linear_beta is not None:
        up = tanh(up / activation.linear_beta) * activation.linear_beta
    return opening * up
