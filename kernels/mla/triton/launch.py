"""What an MLA layer calls on a GPU: attention over pages, and the write of latents, both over one plan a step.

| argument | dtype | shape |
| --- | --- | --- |
| q (absorbed) | bf16 or fp32 | [R, Hq, r + dr] |
| pages (one layer) | that of q; any stride between pages | [P, 64, r + dr] |
| result | fp32 | [R, Hq, r] |

Two kernels make the splits' partial results: hopper.py for the published geometries (512 + 64, bf16, sm_90), split.py
for anything else. Model and machine choose, never the batch; their bits are equal all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
import triton
from torch import Tensor

from forkpoint.kernels.elementwise import LOG2_E
from forkpoint.kernels.mla import plan as plans
from forkpoint.kernels.mla.plan import MlaPlan
from forkpoint.kernels.mla.triton.split import combine_kernel, split_kernel, write_kernel
from forkpoint.kernels.mla.work import Work
from forkpoint.limits import PAGE_TOKENS

WORKSPACE_BYTES: Final = 512 << 20
"""Partial results of one launch; longer batches take several."""
RANK_MAX: Final = {torch.bfloat16: 512, torch.float32: 128}
"""Latent width that one program's accumulators and pages in flight leave room for."""
ROPE_MAX: Final = 64
HOPPER_RANK: Final = 512
HOPPER_ROPE: Final = 64
HOPPER_ROWS: Final = 64
HOPPER_WARPS: Final = 4
"""Of one of two groups, which the launch counts; the kernel adds the other's."""


@dataclass(frozen=True)
class Shape:
    """Of split_kernel: (token, head) rows of a block, warps that hold its accumulators, loads in flight."""

    rows: int
    warps: int
    stages: int


SHAPES: Final = {torch.bfloat16: Shape(64, 8, 2), torch.float32: Shape(16, 4, 3)}
"""bf16: 64 rows make every product wgmma. fp32 is there for tests: no tensor core, and larger blocks spill."""


@dataclass(frozen=True)
class Combine:
    """Of combine_kernel: rows and columns of a program, its warps. Elementwise, so free to choose."""

    rows: int
    columns: int
    warps: int


COMBINE: Final = Combine(4, 128, 4)


def why_not(q: Tensor, pages: Tensor, r: int) -> str | None:
    """Why `paged_mla` does not take a call, or None."""
    if q.dim() != 3 or pages.dim() != 3 or q.shape[2] != pages.shape[2]:
        return f"q {tuple(q.shape)} and pages {tuple(pages.shape)} are not [R, Hq, D] and [P, 64, D]"
    if pages.shape[1] != PAGE_TOKENS:
        return f"a page has {pages.shape[1]} rows, not {PAGE_TOKENS}"
    if q.dtype != pages.dtype or q.dtype not in RANK_MAX:
        return f"q is {q.dtype}, pages {pages.dtype}: both must be bf16, or both fp32"
    for name, size, most in (("r", r, RANK_MAX[q.dtype]), ("dr", q.shape[2] - r, ROPE_MAX)):
        if size < 16 or size > most or size & (size - 1):
            return f"{name} is {size}, not a power of two from 16 to {most} ({q.dtype})"
    if pages.stride(2) != 1 or pages.stride(1) != pages.shape[2]:
        return "the rows of a page are not contiguous"
    return None


def why_not_hopper(pages: Tensor, r: int) -> str | None:
    """Why split.py's kernel runs instead of hopper.py's, or None. Facts of the model and the machine only."""
    if not pages.is_cuda or torch.cuda.get_device_capability(pages.device) != (9, 0):
        return "hopper.py needs compute capability 9.0"
    if pages.dtype != torch.bfloat16 or (r, pages.shape[2] - r) != (HOPPER_RANK, HOPPER_ROPE):
        return f"hopper.py needs latents of 512 + 64 in bf16, got {r} + {pages.shape[2] - r} in {pages.dtype}"
    if pages.stride(0) % pages.shape[2] or pages.data_ptr() % 16:
        return "hopper.py needs pages whose stride is a multiple of their rows', at multiples of 16 bytes"
    return None


def _items_max(workspace: int, rows: int, r: int) -> int:
    return max(1, workspace // (4 * rows * (r + 2)))


def plan(
    page_tables: Sequence[Sequence[int]],
    cu_seqlens: Sequence[int],
    starts: Sequence[int],
    device: torch.device | str,
    heads: int | None = None,
    r: int = HOPPER_RANK,
    dtype: torch.dtype = torch.bfloat16,
) -> MlaPlan:
    """Plans one step for all MLA layers; arguments as in kernels/mla/naive.py.

    With `heads` (and `r`, `dtype`) of the model, everything reaches the device in one copy; without, the first layer
    adds a second one. Raises ValueError when a page table does not reach its sequence's last row.
    """
    return plans.plan(page_tables, cu_seqlens, starts, device, [] if heads is None else [works_of(heads, r, dtype)])


def works_of(heads: int, r: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """What `paged_mla` asks `MlaPlan.works` for, for a model of these sizes."""
    rows = SHAPES[dtype].rows
    return heads, rows, _items_max(WORKSPACE_BYTES, rows, r)


def paged_mla(
    q: Tensor,
    pages: Tensor,
    plan: MlaPlan,
    r: int,
    scale: float,
    shape: Shape | None = None,
    workspace: int = WORKSPACE_BYTES,
) -> Tensor:
    """Causal attention of packed rows over their sequences' pages: q [R, Hq, r + dr] absorbed -> ctx [R, Hq, r], fp32.

    The rows' own latents already lie in pages (`write_latents`). `shape` takes split_kernel with other than the
    pinned values, and `workspace` cuts launches otherwise, for tests and tuning. Raises ValueError with `why_not`'s
    reason, or when q has not the plan's rows.
    """
    if reason := why_not(q, pages, r):
        raise ValueError(reason)
    rows, heads, _ = q.shape
    if rows != plan.rows:
        raise ValueError(f"q has {rows} rows, the plan {plan.rows}")
    out = torch.empty((rows, heads, r), dtype=torch.float32, device=q.device)
    chosen = shape or SHAPES[q.dtype]
    works = plan.works(heads, chosen.rows, _items_max(workspace, chosen.rows, r))
    lines = works.items_max * chosen.rows
    partial = torch.empty((lines, r), dtype=torch.float32, device=q.device)
    scalars = torch.empty((2, lines), dtype=torch.float32, device=q.device)
    q = q.contiguous()
    for launch in works.launches:
        if shape is None and why_not_hopper(pages, r) is None:
            _hopper(q, pages, plan, launch, partial, scalars, scale)
        else:
            _split(q, pages, plan, launch, partial, scalars, scale, chosen, r)
        _combine(launch, partial, scalars, out, chosen.rows)
    return out


def _split(
    q: Tensor, pages: Tensor, plan: MlaPlan, launch: Work, partial: Tensor, scalars: Tensor, scale: float,
    shape: Shape, r: int,
) -> None:  # fmt: skip
    split_kernel[(launch.records.shape[0],)](
        q, pages, plan.tables, launch.records, partial, scalars[0], scalars[1], scale * LOG2_E, pages.stride(0),
        HEADS=q.shape[1], R=r, DR=q.shape[2] - r, BLOCK=shape.rows, PAGE=PAGE_TOKENS,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _hopper(
    q: Tensor, pages: Tensor, plan: MlaPlan, launch: Work, partial: Tensor, scalars: Tensor, scale: float
) -> None:
    # Gluon and TMA descriptors exist where a GPU is; the interpreter knows neither.
    from forkpoint.kernels.mla.triton.hopper import hopper_kernel
    from forkpoint.kernels.mla.triton.tma import row_blocks

    items = launch.records.shape[0]
    queries = q if q.data_ptr() % 16 == 0 else q.clone()
    hopper_kernel[(min(items, _multiprocessors(q.device)),)](
        *row_blocks(queries), *row_blocks(pages), plan.tables, launch.records, items, partial, scalars[0], scalars[1],
        scale * LOG2_E, pages.stride(0) // pages.shape[2], HEADS=q.shape[1], num_warps=HOPPER_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _combine(launch: Work, partial: Tensor, scalars: Tensor, out: Tensor, block: int) -> None:
    r = out.shape[2]
    columns = min(r, COMBINE.columns)
    combine_kernel[(launch.blocks.shape[0] * (block // COMBINE.rows), r // columns)](
        partial, scalars[0], scalars[1], launch.blocks, out, R=r, BLOCK=block, LANES=COMBINE.rows, COLUMNS=columns,
        num_warps=COMBINE.warps, enable_fp_fusion=False,
    )  # fmt: skip


def write_latents(latents: Tensor, pages: Tensor, plan: MlaPlan) -> None:
    """Stores latents [R, r + dr] of packed rows in their pages, [P, 64, r + dr]; writes no other place.

    Rounds to the pages' dtype. Raises ValueError when rows or widths differ or a page's rows are not contiguous.
    """
    rows, width = latents.shape
    if pages.shape[1:] != (PAGE_TOKENS, width) or pages.stride(2) != 1 or pages.stride(1) != width:
        raise ValueError(f"pages {tuple(pages.shape)} do not take contiguous rows of {width}")
    if rows != plan.rows:
        raise ValueError(f"{rows} rows of latents, the plan has {plan.rows}")
    if rows:
        write_kernel[(rows,)](
            latents.contiguous(), pages, plan.places, pages.stride(0), width, PAGE=PAGE_TOKENS,
            BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
