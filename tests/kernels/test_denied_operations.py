"""A scan of the sources of kernels/ and model/: operations whose bits depend on their surroundings are not called.

What they are replaced by is in kernels/elementwise.py, matmul/naive.py and norm/naive.py; test_allow_list.py shows
why. The training script of the tiny model and what draws random weights are no part of the product's arithmetic.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DENIED = {
    # Other bits at the end of a vector than in its middle.
    *("sigmoid", "silu", "softplus", "exp2", "gelu", "logsigmoid"),
    # The order of summation follows the shape of the batch.
    *("softmax", "log_softmax", "logsumexp", "logcumsumexp", "mean", "norm", "var", "std", "prod", "cumprod"),
    *("layer_norm", "einsum", "mm", "matmul", "mv", "dot", "vdot", "inner", "tensordot", "addmm", "addmv", "baddbmm"),
    *("addbmm", "scaled_dot_product_attention", "conv1d"),
    # May or may not be fused into one rounding.
    *("addcmul", "addcdiv", "lerp"),
    # A shared generator, or ties that go anywhere.
    *("multinomial", "topk", "rand", "randn", "uniform_", "exponential_"),
}
"""Called as a function or method of torch; a trailing underscore makes no difference."""

ONLY_IN = {
    "bmm": {"kernels/matmul/naive.py"},
    "sum": {"kernels/norm/naive.py", "kernels/sampler/naive.py", "kernels/sampler/triton.py", "kernels/mla/work.py"},
    "cumsum": {"kernels/kda/tile.py", "kernels/sampler/naive.py", "kernels/mla/work.py", "kernels/staging/pieces.py"},
    "@": {"kernels/kda/naive.py"},
}
"""Fine where the shape is fixed, the row contiguous, or the numbers are integers; `@` in the fp64 definition of KDA."""


def is_arithmetic(path: Path) -> bool:
    return path.parent != ROOT / "model" / "tiny" and path != ROOT / "model" / "random_weights.py"


def violations(source: str, path: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="math"))):
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id="tl" | "gl"))):
                continue  # Triton and Gluon: a program's own block, of a shape that the width alone decides
            case ast.Call(func=ast.Attribute(attr=name)) if name in DENIED or name.removesuffix("_") in DENIED:
                yield f"{path}:{node.lineno}: .{name}()"
            case ast.Call(func=ast.Attribute(attr=("bmm" | "sum" | "cumsum") as name)) if path not in ONLY_IN[name]:
                yield f"{path}:{node.lineno}: .{name}()"
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()) if path not in ONLY_IN["@"]:
                yield f"{path}:{node.lineno}: @"
            case ast.ImportFrom(module=str(module)) if module == "torch.nn" or module.startswith("torch.nn."):
                yield f"{path}:{node.lineno}: from {module}"
            case ast.ImportFrom(module="torch", names=names):
                for alias in names:
                    if alias.name == "nn" or alias.name in DENIED or alias.name in ONLY_IN:
                        yield f"{path}:{node.lineno}: from torch import {alias.name}"
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.startswith("torch.nn"):
                        yield f"{path}:{node.lineno}: import {alias.name}"
            case ast.Attribute(value=ast.Name(id="torch"), attr="nn"):
                yield f"{path}:{node.lineno}: torch.nn"


@pytest.mark.parametrize("folder", ["kernels", "model"])
def test_no_source_calls_a_denied_operation(folder: str) -> None:
    sources = [path for path in sorted((ROOT / folder).rglob("*.py")) if is_arithmetic(path)]
    assert sources
    found = [v for p in sources for v in violations(p.read_text(encoding="utf-8"), p.relative_to(ROOT).as_posix())]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.sigmoid(x)", "x.sigmoid_()", "torch.nn.functional.silu(x)", "from torch.nn import functional", "x @ w",
        "import torch.nn.functional as F", "from torch import nn", "torch.bmm(a, b)", "x.sum(-1)", "x.cumsum(0)",
        "from torch import einsum", "x.mean()", "torch.exp2(x)",
    ],
)  # fmt: skip
def test_the_scan_finds_what_it_should(line: str) -> None:
    assert len(list(violations(line, "model/layer.py"))) >= 1


def test_the_scan_lets_our_own_functions_pass() -> None:
    source = "from forkpoint.kernels.elementwise import sigmoid\ny = sigmoid(x) + torch.exp(x)\n"
    assert list(violations(source, "model/layer.py")) == []
