"""After the serial pass: a slot keeps what it needs of its sequence's end.

A kernel of its own, since everything that reads a slot's open rows must have read them before they are written.
"""

import triton
import triton.language as tl

from forkpoint.kernels.kda.triton.rows import keep_conv, sigmoid


@triton.jit
def keep_rows(new, kept, left_out, right_out, at, rows, H: tl.constexpr):
    """Copies left and right factors of the tile that stays open into the slot."""
    slot, head, begin, stop = rows
    place, key = tl.arange(0, 16)[:, None], tl.arange(0, 128)[None, :]
    mask = (place >= begin) & (place < stop) & (key >= 0)
    target = ((slot * 16 + place) * H + head) * 128 + key
    tl.store(left_out + target, tl.load(kept + place * 128 + key, mask=mask), mask=mask)
    tl.store(right_out + target, tl.load(new + place * 128 + key, mask=mask), mask=mask)


@triton.jit
def keep_kernel(
    sequences, x, b, v_new, rest_in, left_kept, total_kept, reference_kept, o, ring, grid, left_open, right_open,
    v_open, beta_open, total_open, reference_open, x_stride, b_stride, H: tl.constexpr,
):  # fmt: skip
    """Grid (H, N), after everything that reads the slots' open rows: what a slot keeps of its sequence's end, the open
    tile's factors and the conv tails. Zeros in o for slots below 0."""
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(sequences + n * 5).to(tl.int64)
    first_row = tl.load(sequences + n * 5 + 1).to(tl.int64)
    start, end = tl.load(sequences + n * 5 + 2), tl.load(sequences + n * 5 + 3)
    place, key = tl.arange(0, 16), tl.arange(0, 128)
    if (slot >= 0) & (end > start):
        origin, closing, stop = start // 16 * 16, end // 16 - start // 16, end & 15
        begin = tl.where(closing > 0, 0, start & 15)
        if stop > 0:
            at = (tl.load(sequences + n * 5 + 4) + closing) * H + head
            mask = (place >= begin) & (place < stop)
            line = first_row + origin + closing * 16 - start + place
            wide = mask[:, None] & (key >= 0)[None, :]
            v = tl.load(v_new + (line * H + head)[:, None] * 128 + key[None, :], mask=wide)
            tl.store(v_open + ((slot * 16 + place) * H + head)[:, None] * 128 + key[None, :], v, mask=wide)
            rows = (slot, head, begin, stop)
            keep_rows(rest_in + at * 2048, left_kept + (n * H + head) * 2048, left_open, right_open, at, rows, H)
            last = (n * H + head) * 128 + key
            tl.store(total_open + (slot * H + head) * 128 + key, tl.load(total_kept + last))
            tl.store(reference_open + (slot * H + head) * 128 + key, tl.load(reference_kept + last))
            logit = tl.load(b + line * b_stride + head, mask=mask)
            tl.store(beta_open + (slot * 16 + place) * H + head, sigmoid(logit.to(tl.float32)), mask=mask)
        for part in tl.static_range(3):
            channel = (part * H + head) * 128 + key
            keep_conv(x, ring, grid, slot, first_row, start, end, channel, x_stride, H * 384)
    if slot < 0:
        zero = tl.zeros((16, 128), tl.float32).to(o.dtype.element_ty)
        for t in range(tl.cdiv(end - start, 16)):
            row = first_row + t * 16 + place[:, None]
            tl.store(o + (row * H + head) * 128 + key[None, :], zero, mask=row < first_row + end - start)
