"""Routing in Triton: one program a row of logits, so nothing of a row can reach another.

Choices are unique integers (score in the order of fp32, lower id first), so the chosen set depends on no order of
comparing. Everything after that goes expert by expert in ascending id.

| argument | dtype | shape |
| --- | --- | --- |
| logits | fp32, contiguous | [R, E] |
| bias | fp32, contiguous | [E] |
| experts, weights | int64, fp32 | [R, k] |
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.ffn.triton import sigmoid
from forkpoint.kernels.filters.triton import ordered
from forkpoint.kernels.matmul.triton import linear
from forkpoint.kernels.router.naive import SUM_EPS as EPS
from forkpoint.kernels.router.routes import Router, Routes

EXPERTS_MAX: Final = 1024
"""A row's keys lie in one program's registers."""
PER_TOKEN_MAX: Final = 32
WARPS: Final = 4
NOTHING = tl.constexpr(-(1 << 63))
SUM_EPS = tl.constexpr(EPS)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def route_kernel(
    logits, bias, experts, weights, count, scaling,
    PER_TOKEN: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores, choice and weights of one row of `count` <= BLOCK experts."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < count
    score = sigmoid(tl.load(logits + row * count + expert, mask=real, other=0.0))
    choice = score + tl.load(bias + expert, mask=real, other=0.0)
    # As in a sort: NaN is the largest, and -0 equals 0.
    order = ordered(tl.where(choice == 0.0, 0.0, choice))
    order = tl.where(choice != choice, NAN_BITS, order)
    key = tl.where(real, order.to(tl.int64) * BLOCK + (BLOCK - 1 - expert), NOTHING)
    left = key
    last = tl.max(left, axis=0)
    for _ in tl.static_range(PER_TOKEN - 1):
        left = tl.where(left == last, NOTHING, left)
        last = tl.max(left, axis=0)
    chosen = key >= last
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    weight = choice if BIASED else score
    if NORMALIZE:
        total = tl.sum(tl.where(chosen & (place == 0), weight, 0.0), axis=0)
        for n in tl.static_range(1, PER_TOKEN):
            # A sum of one weight and zeros is that weight, in any order.
            total += tl.sum(tl.where(chosen & (place == n), weight, 0.0), axis=0)
        weight = weight / (total + SUM_EPS)
    out = row * PER_TOKEN + place
    tl.store(experts + out, expert.to(tl.int64), mask=chosen)
    tl.store(weights + out, weight * scaling, mask=chosen)


def why_not(router: Router) -> str | None:
    """Why the kernel does not take a router, or None."""
    experts = router.bias.shape[0]
    if not 0 < experts <= EXPERTS_MAX:
        return f"{experts} experts: 1 to {EXPERTS_MAX}"
    if not 0 < router.per_token <= min(experts, PER_TOKEN_MAX):
        return f"{router.per_token} experts a row of {experts}: 1 to {min(experts, PER_TOKEN_MAX)}"
    if router.bias.dtype != torch.float32 or not router.bias.is_contiguous():
        return f"a bias of {router.bias.dtype}: fp32 and contiguous"
    return None


def choose(logits: Tensor, router: Router) -> Routes:
    """Routes of rows by their logits [R, E] fp32, contiguous. Raises ValueError with a reason."""
    if reason := why_not(router):
        raise ValueError(reason)
    rows, count = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or count != router.bias.shape[0]:
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype} are not [R, {router.bias.shape[0]}] fp32")
    experts = torch.empty((rows, router.per_token), dtype=torch.int64, device=logits.device)
    weights = torch.empty((rows, router.per_token), dtype=torch.float32, device=logits.device)
    if rows:
        route_kernel[(rows,)](
            logits, router.bias, experts, weights, count, router.scaling_factor,
            PER_TOKEN=router.per_token, NORMALIZE=router.renormalize and router.per_token > 1,
            BIASED=router.biased_weights, BLOCK=triton.next_power_of_2(count), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return Routes(experts, weights)


def route(x: Tensor, router: Router) -> Routes:
    """Routes of rows x [R, hidden] of the dtype of the router's weight. Raises ValueError with a reason."""
    return choose(linear(x, router.weight, torch.float32), router)
