"""Absorbed multi-head latent attention in Triton, reading pages where they lie.

Rows of any kind (decoded, prompt, replayed) take one path. Keys are cut into splits at absolute positions. Within a
split, pages come in ascending order, with a running maximum; splits are folded in ascending order:

    s = (q . key) scale log2(e)    m' = max(m, max s)    p = 2^(s - m')
    A = A 2^(m - m') + p V         l = l 2^(m - m') + p 1          (p rounded to the pages' dtype)
    M' = max(M, m)   N = N 2^(M - M') + A 2^(m - M')   D = D 2^(M - M') + l 2^(m - M')    ctx = N / D

A page or split without a key for a row leaves the row's numbers as they are: its maximum is -inf, so both factors
are exactly 1 and 0, and what is added is 0. Row sums come from the same MMA as the values. Hence a row's bits depend
on its own query and keys alone, not on the rows of its block, nor on how far those reach.
"""

import triton
import triton.language as tl


@triton.jit
def split_kernel(
    q, pages, tables, records, partial, maxima, sums, scale, page_stride,
    HEADS: tl.constexpr, R: tl.constexpr, DR: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One block of (token, head) rows over one split of keys: A [BLOCK, R], m and l [BLOCK], all fp32."""
    record = records + tl.program_id(0).to(tl.int64) * 8
    line = tl.load(record).to(tl.int64)
    start = tl.load(record + 2)
    end = tl.load(record + 3)
    first_key = tl.load(record + 4)
    steps = tl.load(record + 5)
    table = tables + tl.load(record + 6)
    slot = tl.load(record + 7).to(tl.int64)
    row = tl.arange(0, BLOCK)
    place = tl.load(record + 1) + row
    inside = place < (end - start) * HEADS
    position = start + place // HEADS
    width: tl.constexpr = R + DR
    latent_column = tl.arange(0, R)
    rope_column = R + tl.arange(0, DR)
    query = q + (line + row)[:, None] * width
    q_latent = tl.load(query + latent_column[None, :], mask=inside[:, None], other=0.0)
    q_rope = tl.load(query + rope_column[None, :], mask=inside[:, None], other=0.0)
    ones = tl.full((PAGE, 16), 1.0, dtype=q.dtype.element_ty)
    m = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK, 16), dtype=tl.float32)
    attended = tl.zeros((BLOCK, R), dtype=tl.float32)
    # A page's number is read one step ahead: loads that wait for a load of their own step are not pipelined.
    number = tl.load(table).to(tl.int64)
    for step in range(steps):
        base = pages + number * page_stride
        number = tl.load(table + tl.minimum(step + 1, steps - 1)).to(tl.int64)
        key = first_key + step * PAGE + tl.arange(0, PAGE)
        # Places without a token were never written: what lies there must not even meet a 0.
        present = (key < end)[:, None]
        latents = base + tl.arange(0, PAGE)[:, None] * width
        latent = tl.load(latents + latent_column[None, :], mask=present, other=0.0)
        rope = tl.load(latents + rope_column[None, :], mask=present, other=0.0)
        score = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee") * scale
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        highest = tl.maximum(m, tl.max(score, axis=1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        decay = tl.exp2(m - finite)
        weight = tl.exp2(score - finite[:, None]).to(q.dtype.element_ty)
        m = highest
        total = tl.dot(weight, ones, total * decay[:, None], input_precision="ieee")
        attended = tl.dot(weight, latent, attended * decay[:, None], input_precision="ieee")
    out = slot * BLOCK + row
    tl.store(partial + out[:, None] * R + latent_column[None, :], attended)
    tl.store(maxima + out, m)
    tl.store(sums + out, tl.max(total, axis=1))  # all columns are equal


@triton.jit
def folded(top, numerator, denominator, m, attended, total):
    """One more split: M', N, D."""
    highest = tl.maximum(top, m)
    before, now = tl.exp2(top - highest), tl.exp2(m - highest)
    return highest, numerator * before[:, None] + attended * now[:, None], denominator * before + total * now


@triton.jit
def combine_kernel(
    partial, maxima, sums, blocks, out,
    R: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Folds the splits of LANES rows of a block, COLUMNS of them, ascending: one split takes the same steps as many.

    Four splits are read at once. A split that is not there is like one without a key: it changes nothing.
    """
    block = blocks + (tl.program_id(0) // (BLOCK // LANES)).to(tl.int64) * 4
    lane = tl.program_id(0) % (BLOCK // LANES) * LANES + tl.arange(0, LANES)
    inside = lane < tl.load(block + 1)
    line = tl.load(block + 2).to(tl.int64) * BLOCK + lane
    splits = tl.load(block + 3)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(block).to(tl.int64) + lane
    top = tl.load(maxima + line, mask=inside, other=0.0)
    total = tl.load(sums + line, mask=inside, other=1.0)
    attended = tl.load(partial + line[:, None] * R + column[None, :], mask=inside[:, None], other=0.0)
    for first in range(1, splits, 4):
        l0 = line + first * BLOCK
        l1, l2, l3 = l0 + BLOCK, l0 + 2 * BLOCK, l0 + 3 * BLOCK
        h1, h2, h3 = inside & (first + 1 < splits), inside & (first + 2 < splits), inside & (first + 3 < splits)
        m0, t0 = tl.load(maxima + l0, mask=inside, other=0.0), tl.load(sums + l0, mask=inside, other=0.0)
        m1, t1 = tl.load(maxima + l1, mask=h1, other=float("-inf")), tl.load(sums + l1, mask=h1, other=0.0)
        m2, t2 = tl.load(maxima + l2, mask=h2, other=float("-inf")), tl.load(sums + l2, mask=h2, other=0.0)
        m3, t3 = tl.load(maxima + l3, mask=h3, other=float("-inf")), tl.load(sums + l3, mask=h3, other=0.0)
        a0 = tl.load(partial + l0[:, None] * R + column[None, :], mask=inside[:, None], other=0.0)
        a1 = tl.load(partial + l1[:, None] * R + column[None, :], mask=h1[:, None], other=0.0)
        a2 = tl.load(partial + l2[:, None] * R + column[None, :], mask=h2[:, None], other=0.0)
        a3 = tl.load(partial + l3[:, None] * R + column[None, :], mask=h3[:, None], other=0.0)
        top, attended, total = folded(top, attended, total, m0, a0, t0)
        top, attended, total = folded(top, attended, total, m1, a1, t1)
        top, attended, total = folded(top, attended, total, m2, a2, t2)
        top, attended, total = folded(top, attended, total, m3, a3, t3)
    # + 0.0: what is equal as a number must be equal as bytes.
    value = attended / total[:, None] + 0.0
    tl.store(out + row[:, None] * R + column[None, :], value, mask=inside[:, None])


@triton.jit
def write_kernel(latents, pages, places, page_stride, width, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """One row to its place: places int32 [R] = page * PAGE + row of the page."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(latents + row * width + column, mask=column < width)
    target = pages + (place // PAGE) * page_stride + (place % PAGE) * width + column
    tl.store(target, value.to(pages.dtype.element_ty), mask=column < width)
