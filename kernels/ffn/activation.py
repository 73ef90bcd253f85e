"""Activation: what a gated feed-forward block applies to its gate and its up projection."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

ActivationName = Literal["silu", "situ"]
ACTIVATIONS: Final[tuple[ActivationName, ...]] = get_args(ActivationName)


@dataclass(frozen=True, slots=True)
class Activation:
    """`silu`: silu(g) u. `situ`: beta tanh(g / beta) sigmoid(g) · linear_beta tanh(u / linear_beta), in fp32.

    `linear_beta` None leaves u as it is. `silu` reads neither number. Source: K3's published config and formula.
    """

    name: ActivationName = "silu"
    beta: float = 1.0
    linear_beta: float | None = None


SILU: Final = Activation()
