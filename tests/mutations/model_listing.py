"""Mistakes of the forward pass: those that make it another model's, and one that makes rows depend on their company.

tests/oracles/mistakes.py has many more of the first kind, as changes of a model in one process.
"""

from typing import Final

from tests.mutations.mutation import Mutation

GOLDEN: Final = "tests/oracles/test_golden.py::test_logits_match_another_implementations"

MODELS: Final = (
    Mutation(
        "go-on-over-a-blocks-border",
        "the sum of Attention Residuals does not start again when it is banked",
        "model/residual.py",
        "        self._x = None\n",
        "",
        (GOLDEN, "-k", "k3"),
    ),
    Mutation(
        "leave-the-bias-out-of-the-choice",
        "experts are chosen by their scores alone",
        "kernels/router/naive.py",
        "    biased = scores + router.bias\n",
        "    biased = scores\n",
        (GOLDEN, "-k", "kimi-linear"),
    ),
    Mutation(
        "leave-the-scaling-factor-out",
        "experts' weights are not multiplied by routed_scaling_factor",
        "kernels/router/naive.py",
        "    return Routes(experts, weights * router.scaling_factor)\n",
        "    return Routes(experts, weights)\n",
        (GOLDEN, "-k", "k3"),
    ),
    Mutation(
        "read-the-high-half-first",
        "a byte's elements of MXFP4 are exchanged",
        "kernels/experts/mxfp4.py",
        "torch.stack([values & 15, values >> 4], dim=-1)",
        "torch.stack([values >> 4, values & 15], dim=-1)",
        ("tests/kernels/test_mxfp4.py",),
    ),
    Mutation(
        "multiply-experts-rows-together",
        "rows of an expert are one product, whose bits follow from how many there are",
        "kernels/experts/naive.py",
        "linear(glu(gate, up, activation), down)",
        "glu(gate, up, activation) @ down.t()",
        ("tests/kernels/test_experts.py",),
    ),
)
