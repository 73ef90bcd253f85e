"""Weights of all experts of one layer, as kernels read them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One matrix [N, K] an expert.

    Dense: values [E, N, K] in a float dtype, scales None. MXFP4: values [E, N, K / 2] uint8, two elements a byte, the
    first in the low half; scales [E, N, K / 32] uint8, powers of two.
    """

    values: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """gate_up: w1 above w3, [2 I, D] an expert; down: w2, [D, I]."""

    gate_up: ExpertMatrix
    down: ExpertMatrix
