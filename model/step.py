"""Step: one batch on its way through the model."""

from typing import Protocol

from torch import Tensor

from forkpoint.kernels.kda.triton.state import KdaWeights


class Step(Protocol):
    """One batch on its way through the model: what all its layers share was planned and copied to the device once.

    Rows are in the step's own order between `embed` and `finish`.
    """

    def embed(self, table: Tensor) -> Tensor:
        """Residual rows [R, hidden] of the batch's tokens; table [vocab, hidden]."""
        ...

    def kda(self, x: Tensor, z: Tensor, b: Tensor, weights: KdaWeights, layer: int) -> Tensor:
        """Convolution, normalised q and k, gates and the delta rule of the `layer`-th KDA layer, whose slots move on.

        x [R, H (2 K + V)] conv inputs, z [R, H K] raw decay gate, b [R, H] logits of beta -> o [R, H, V].
        """
        ...

    def attend(self, q: Tensor, latents: Tensor, rank: int, scale: float, layer: int) -> Tensor:
        """Writes latents [R, r + dr] to the pages of the `layer`-th MLA layer, then attends to them.

        q [R, Hq, r + dr] absorbed -> [R, Hq, r].
        """
        ...

    def finish(self, rows: Tensor) -> Tensor:
        """Stores the final-norm rows that the slots keep, and returns all of them in the batch's order."""
        ...
