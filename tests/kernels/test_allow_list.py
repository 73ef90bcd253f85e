"""The operations CPU exact mode is made of: their bits depend on the operand alone.

Not on its place in a vector, the vector's length, strides, address, or on how many rows share a call. Each
operation runs over vectors longer than torch's grain (32,768 values), so that threads split some of them and not
others. If one of these fails on another CPU or torch, that machine must not claim exact mode.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forkpoint.kernels.elementwise import GATE_ONE, pow2_fixed, sigmoid, silu, softplus
from forkpoint.kernels.ffn.activation import Activation
from forkpoint.kernels.ffn.naive import glu
from forkpoint.kernels.matmul.naive import bmm_fixed, linear
from forkpoint.kernels.norm.naive import SUM_BLOCK, row_sum
from tests.support.kernels import at_offset, same_bytes

LENGTH = 70_001
Op = Callable[[Tensor], Tensor]

ALLOWED: dict[str, tuple[Op, bool]] = {
    "exp": (torch.exp, False),
    "log": (torch.log, True),
    "tanh": (torch.tanh, False),
    "log1p": (torch.log1p, True),
    "expm1": (torch.expm1, False),
    "rsqrt": (torch.rsqrt, True),
    "log2": (torch.log2, True),
    "sqrt": (torch.sqrt, True),
    "reciprocal": (torch.reciprocal, False),
    "sigmoid": (sigmoid, False),
    "silu": (silu, False),
    "softplus": (softplus, False),
    "maximum": (lambda x: torch.maximum(x, -0.5 * x), False),
    "division": (lambda x: x / (1.5 - 0.5 * x), False),
    "division by a number": (lambda x: x / 25.0, False),
    "product and sum": (lambda x: 1.5 * x + x * (x - 2.5), False),
    "situ": (lambda x: glu(x, 0.7 * x - 1.0, Activation("situ", 4.0, 25.0)), False),
}


def depends_on_place(op: Op, x: Tensor) -> list[str]:
    """Names of what the bits of op depend on besides the operand, [] when nothing."""
    whole = op(x)
    found: list[str] = []
    slices = [(start, length) for start in range(19) for length in (*range(1, 36), 1000, 33_000)]
    if not all(same_bytes(op(x[s : s + n]), whole[s : s + n]) for s, n in slices):
        found.append("place")
    if not all(same_bytes(op(at_offset(x[:999], n)), whole[:999]) for n in range(1, 17)):
        found.append("address")
    if not same_bytes(op(x[::3]), whole[::3]):
        found.append("stride")
    matrix, result = x[:70_000].view(700, 100), whole[:70_000].view(700, 100)
    if not (same_bytes(op(matrix.t()), result.t()) and same_bytes(op(matrix[:, 3:50]), result[:, 3:50])):
        found.append("layout")
    torch.set_num_threads(1)
    if not same_bytes(op(x), whole):
        found.append("threads")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALLOWED)
def test_an_allowed_function_depends_on_its_operand_alone(name: str, dtype: torch.dtype) -> None:
    op, positive = ALLOWED[name]
    x = torch.randn(LENGTH, dtype=dtype) * 6
    assert depends_on_place(op, x.abs() + 1e-3 if positive else x) == []


def test_a_power_of_a_fixed_point_gate_depends_on_its_operand_alone() -> None:
    n = torch.randint(-400 * GATE_ONE, 100 * GATE_ONE, (LENGTH,), dtype=torch.int32)
    assert depends_on_place(pow2_fixed, n) == []


@pytest.mark.parametrize("name", ["sigmoid", "exp2"])
def test_the_check_finds_a_function_that_depends_on_its_place(name: str) -> None:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("without vector instructions there is no vector's end to differ")
    assert depends_on_place(getattr(torch, name), torch.randn(LENGTH) * 6) != []


# (M, K, N) as the product uses them: linear layers, tile products, scores and values of a page, odd ones.
SHAPES = [
    (16, 256, 448), (16, 448, 256), (16, 256, 16), (16, 128, 256), (16, 2304, 64),
    (32, 128, 128), (32, 16, 24), (32, 24, 16), (32, 128, 16), (32, 128, 32), (16, 16, 128), (16, 16, 24),
    (128, 16, 128), (24, 16, 32), (8, 8, 8), (16, 160, 64), (16, 64, 128), (16, 64, 24), (16, 64, 16), (16, 33, 65),
]  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "transposed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_item_of_a_batched_product_depends_on_itself_alone(shape: tuple[int, int, int], transposed: bool) -> None:
    m, k, n = shape
    a, stored = torch.randn(21, m, k), torch.randn(21, n, k) if transposed else torch.randn(21, k, n)

    def product(left: Tensor, right: Tensor) -> Tensor:
        return bmm_fixed(left, right.transpose(1, 2) if transposed else right)

    whole = product(a, stored)
    for first, count in ((0, 1), (20, 1), (3, 2), (5, 8), (2, 19)):
        now = slice(first, first + count)
        assert same_bytes(product(a[now], stored[now]), whole[now])
        assert same_bytes(product(a[now].clone(), stored[now].clone()), whole[now])
    for items in (1, 2, 3, 5, 8, 13):
        assert same_bytes(product(at_offset(a, items), at_offset(stored, 16 - items)), whole)
    shared = stored[:1].expand(21, -1, -1)
    assert same_bytes(product(a, shared)[7], product(a[7:8], stored[:1])[0])
    turned = torch.randperm(m)
    assert same_bytes(product(a[:, turned], stored), whole[:, turned])
    left_transposed = a.transpose(1, 2).contiguous().transpose(1, 2)
    assert same_bytes(product(left_transposed, stored), whole)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batched_product_has_the_same_bits_on_one_thread_and_on_two(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = torch.randn(5, m, k), torch.randn(5, k, n)
    on_two = [bmm_fixed(a, b), bmm_fixed(a[:1], b[:1])]
    torch.set_num_threads(1)
    assert same_bytes(bmm_fixed(a, b), on_two[0])
    assert same_bytes(bmm_fixed(a[:1], b[:1]), on_two[1])


def test_what_later_rows_hold_does_not_change_earlier_ones() -> None:
    """Products do not mix rows, so a decode step's zeros and a prefill's tokens leave the rows before them alone."""
    a, b = torch.randn(3, 16, 128), torch.randn(3, 128, 24)
    whole = bmm_fixed(a, b)
    for row in (1, 7, 15):
        for filler in (0.0, float("nan"), float("inf")):
            cut = a.clone()
            cut[:, row:] = filler
            assert same_bytes(bmm_fixed(cut, b)[:, :row], whole[:, :row])
    lower = torch.randn(3, 16, 16).tril()
    u = torch.randn(3, 16, 128)
    for row in (1, 7, 15):
        cut = u.clone()
        cut[:, row:] = 0.0
        assert torch.equal(bmm_fixed(lower, cut)[:, :row], bmm_fixed(lower, u)[:, :row])


@pytest.mark.parametrize("outputs", [1, 2, 5, 8, 11, 12, 16, 17, 40, 272])
@pytest.mark.parametrize("inputs", [16, 33, 256])
def test_a_row_of_linear_depends_on_that_row_alone(inputs: int, outputs: int) -> None:
    x, weight = torch.randn(41, inputs), torch.randn(outputs, inputs)
    whole = linear(x, weight)
    assert whole.shape == (41, outputs) and whole.is_contiguous()
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)
    for first, count in ((0, 1), (1, 1), (40, 1), (3, 15), (5, 16), (7, 17), (9, 32)):
        assert same_bytes(linear(x[first : first + count], weight), whole[first : first + count])
    turned = torch.randperm(41)
    assert same_bytes(linear(x[turned], weight), whole[turned])
    wide = torch.randn(41, 3 * inputs)
    wide[:, inputs : 2 * inputs] = x
    assert same_bytes(linear(wide[:, inputs : 2 * inputs], weight), whole)
    for items in (1, 3, 7, 8):
        assert same_bytes(linear(at_offset(x, items), at_offset(weight, 16 - items)), whole)


def test_linear_takes_no_rows_and_refuses_the_wrong_width() -> None:
    assert linear(torch.empty(0, 8), torch.randn(3, 8)).shape == (0, 3)
    with pytest.raises(ValueError, match="takes 8 inputs, x has 9"):
        linear(torch.empty(2, 9), torch.randn(3, 8))


def test_a_batched_product_refuses_strides_that_take_another_path() -> None:
    with pytest.raises(ValueError, match="one of the last two must be 1"):
        bmm_fixed(torch.randn(2, 16, 32)[..., ::2], torch.randn(2, 16, 16))


@pytest.mark.parametrize("width", [1, 3, 64, 128, 256, 7168, SUM_BLOCK, SUM_BLOCK + 1, 40_000])
def test_a_row_sum_depends_on_that_row_alone(width: int) -> None:
    x = torch.randn(9, width)
    whole = row_sum(x)
    assert whole.shape == (9, 1)
    torch.testing.assert_close(whole.double(), x.double().sum(1, keepdim=True), rtol=1e-5, atol=1e-3)
    for first, count in ((0, 1), (8, 1), (3, 2), (1, 7)):
        assert same_bytes(row_sum(x[first : first + count]), whole[first : first + count])
        assert same_bytes(row_sum(at_offset(x[first : first + count], 3)), whole[first : first + count])
    assert same_bytes(row_sum(x.view(3, 3, width)), whole.view(3, 3, 1))
    assert same_bytes(row_sum(x.t().contiguous().t()), whole)
    many = torch.cat((torch.randn(500 if width < 10_000 else 3, width), x))
    assert same_bytes(row_sum(many)[-9:], whole)
    torch.set_num_threads(1)
    assert same_bytes(row_sum(x), whole)


def test_integer_prefix_sums_are_exact_in_any_layout() -> None:
    g = torch.randint(-24 * GATE_ONE, 0, (6, 16, 40), dtype=torch.int32)
    expected = g.to(torch.int64).cumsum(1)
    assert int(expected.min()) > -(2**31)
    assert torch.equal(g.cumsum(1, dtype=torch.int32).to(torch.int64), expected)
    assert torch.equal(g.transpose(0, 2).contiguous().transpose(0, 2).cumsum(1, dtype=torch.int32).long(), expected)


@pytest.mark.parametrize("width", [1, 8, 33, 256, 896])
def test_a_stable_sort_of_a_row_depends_on_that_row_alone_and_keeps_the_order_of_equals(width: int) -> None:
    """Few different values, zeros of both signs among them, so that most of a row ties with something."""
    x = torch.randint(-3, 4, (300, width)).float() / 4.0
    x[::2] *= -1.0

    def ranked(rows: Tensor) -> Tensor:
        return torch.sort(rows, dim=1, descending=True, stable=True).indices

    def in_python(row: list[float]) -> list[int]:
        return sorted(range(width), key=lambda place: -row[place])

    whole = ranked(x)
    assert whole[:7].tolist() == [in_python(row) for row in x[:7].tolist()]
    for first, count in ((0, 1), (299, 1), (3, 2), (1, 17), (5, 250)):
        assert torch.equal(ranked(x[first : first + count]), whole[first : first + count])
        assert torch.equal(ranked(at_offset(x[first : first + count], 3)), whole[first : first + count])
    assert torch.equal(ranked(x.t().contiguous().t()), whole)
    torch.set_num_threads(1)
    assert torch.equal(ranked(x), whole)


def test_what_is_gathered_or_put_in_a_place_is_copied_bit_by_bit() -> None:
    x, places = torch.randn(300, 896), torch.randint(896, (300, 16))
    x[3, 5], x[4, 6] = -0.0, torch.nan
    places[3, 0], places[4, 0] = 5, 6
    gathered = x.gather(1, places)
    rows = torch.arange(300)
    assert same_bytes(gathered, torch.stack([x[rows, places[:, column]] for column in range(16)], dim=1))
    assert same_bytes(x[17:18].gather(1, places[17:18]), gathered[17:18])
    put = torch.full((300, 16, 896), torch.nan)
    put[rows, places[:, 0] % 16] = x
    assert same_bytes(put[rows, places[:, 0] % 16], x)


def test_which_experts_are_asked_for_and_by_whom_is_exact() -> None:
    asked = torch.randint(0, 40, (300, 8))
    assert torch.unique(asked).tolist() == sorted({expert for row in asked.tolist() for expert in row})
    row, place = torch.nonzero(asked == 7, as_tuple=True)
    pairs = list(zip(row.tolist(), place.tolist(), strict=True))
    assert pairs == [(r, p) for r in range(300) for p in range(8) if asked[r, p] == 7]
