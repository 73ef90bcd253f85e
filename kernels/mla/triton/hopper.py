"""The split kernel on Hopper's own units: split.py's arithmetic, product for product, hence its bits.

Latents of 512 + 64 in bf16, blocks of 64 (token, head) rows. Two warp groups of 255 registers a thread share a
persistent program. Pages go in pairs: the even group scores the first and makes its weights p, the odd group the
second; each holds 256 columns of A (128 registers) and adds both pages to them, in order. So one group's softmax has
the other's products beside it. While both score, two chains of 36 products share the tensor cores; one alone would
leave them idle, since each of its products waits for its descriptors. Quarters of a page come by TMA; a group that is
done with a quarter sends for that of the next pair, also across items. A page is read from memory once a block and
lies in shared memory once, for q k and p V alike.

| in shared memory | bytes |
| --- | --- |
| q, 64 x 576 | 73,728 |
| two pages, 64 x 576 each; p, 64 x 64, replaces a page's last 64 columns once they are scored | 147,456 |
| maxima, factors 2^(m - m'), ones, barriers | 3,436 |

Who waits for whom: `full` (TMA has filled a quarter), `q_ready` (rows of q that do not exist are 0), `raised` (maximum
and factor of the even page are there), `weighed` (p of a page is there, and all that comes before it). An odd number of
pages is filled up with the last one once more: it counts as one behind the last position, and a page without a key for
a row changes no bit of it.

With 96 heads on an H200 the tensor cores are busy 65 % of the cycles (ncu); a quarter of the rows that they multiply
do not exist. ADR 0008 says what else was tried.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


@gluon.jit
def turns_of(items):
    """How many items this program has: programs take turns, every second round in reverse, which evens out lengths."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    rounds = items // programs
    place = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + gl.where(place < items - rounds * programs, 1, 0)


@gluon.jit
def item_of(turn, items):
    """The item of one of this program's turns; behind the last turn, any item."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    place = gl.where(turn % 2 == 0, program, programs - 1 - program)
    return gl.minimum(turn * programs + place, items - 1)


@gluon.jit
def load_queries(wide, thin, line, queries, q_rope, full, here):
    """Sends for the 64 rows of q from `line` on; rows behind the end of the tensor come as 0."""
    mbarrier.expect(full, 64 * 576 * 2, pred=here)
    for c in gl.static_range(4):
        tma.async_copy_global_to_shared(wide, [line, c * 128], full, queries.index(c), pred=here)
    tma.async_copy_global_to_shared(thin, [line, 512], full, q_rope.index(0), pred=here)


@gluon.jit
def load_quarter(wide, row, full, quarter, here, C: gl.constexpr):
    """Sends for 128 columns of a page's latents."""
    mbarrier.expect(full, 64 * 128 * 2, pred=here)
    tma.async_copy_global_to_shared(wide, [row, C * 128], full, quarter, pred=here)


@gluon.jit
def load_rope(thin, row, full, rope, here):
    """Sends for a page's last 64 columns."""
    mbarrier.expect(full, 64 * 64 * 2, pred=here)
    tma.async_copy_global_to_shared(thin, [row, 512], full, rope, pred=here)


@gluon.jit
def blank(tile, rows):
    """Rows from `rows` on become 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    x = tile.load(layout)
    tile.store(gl.where((row < rows)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def blank_all(quarters, first, rope, rows):
    """The same for a whole page or block, and the tensor cores see it."""
    for c in gl.static_range(4):
        for half in gl.static_range(2):
            blank(quarters.index(first + c).slice(half * 64, 64, dim=1), rows)
    blank(rope, rows)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def next_page(tables, page_rows, records, items, turn, turns, page):
    """First line of page `page` of a turn's item, whether there is one, and the turn and page that follow."""
    record = records + item_of(turn, items) * 8
    steps = gl.load(record + 5)
    line = gl.load(tables + gl.load(record + 6) + gl.minimum(page, steps - 1)) * page_rows
    done = page + 1 >= (steps + 1) // 2 * 2
    return line, turn < turns, gl.where(done, turn + 1, turn), gl.where(done, 0, page + 1)


@gluon.jit
def take_queries(queries, q_rope, q_full, q_ready, inside, phase, ME: gl.constexpr):
    """Waits for an item's q, of which `inside` rows exist."""
    if ME == 0:
        mbarrier.wait(q_full, phase)
        if inside < 64:
            # Rows of another sequence would change no bit here, but zeros cost the tensor cores less power.
            blank_all(queries, 0, q_rope.index(0), inside)
        mbarrier.arrive(q_ready, count=1)
    else:
        mbarrier.wait(q_ready, phase)


@gluon.jit
def scores(queries, q_rope, keys, ropes, full, phase, present, zero, ME: gl.constexpr):
    """q k of page ME of a pair, [64, 64], of which the first `present` tokens were ever written."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    if present < 64:
        # What lies in a place without a token must not even meet a 0.
        for c in gl.static_range(5):
            mbarrier.wait(full.index(ME * 5 + c), phase)
        blank_all(keys, ME * 4, ropes.index(ME), present)
    score = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout))
    for c in gl.static_range(4):
        mbarrier.wait(full.index(ME * 5 + c), phase)
        key = keys.index(ME * 4 + c + zero).permute((1, 0))
        score = warpgroup_mma(queries.index(c + zero), key, score, use_acc=c > 0, is_async=True)
    mbarrier.wait(full.index(ME * 5 + 4), phase)
    score = warpgroup_mma(q_rope.index(zero), ropes.index(ME + zero).permute((1, 0)), score, is_async=True)
    return warpgroup_mma_wait(0, deps=[score])


@gluon.jit
def weigh(score, m, maxima, factors, rope, raised, weighed, phase, ME: gl.constexpr):
    """p of page ME of a pair, bf16 [64, 64], after m, the maximum before the pair; leaves what others need of it."""
    rows: gl.constexpr = gl.SliceLayout(1, score.type.layout)
    highest = gl.max(score, axis=1)
    if ME == 1:
        mbarrier.wait(raised, phase)
        m = maxima.index(0).load(rows)
    highest = gl.maximum(m, highest)
    finite = gl.where(highest == float("-inf"), 0.0, highest)
    maxima.index(ME).store(highest)
    factors.index(ME).store(gl.exp2(m - finite))
    # After either of these, all warps are done with the columns that p takes the place of.
    if ME == 0:
        mbarrier.arrive(raised, count=1)
    else:
        gl.thread_barrier()
    weight = gl.exp2(score - finite[:, None]).to(gl.bfloat16)
    rope.store(weight)
    fence_async_shared()
    mbarrier.arrive(weighed, count=1)
    return weight


@gluon.jit
def add_page(p, near, far, ones, factor, left, right, total, ME: gl.constexpr):
    """A = A 2^(m - m') + p V and, in the even group, l likewise: on the way."""
    rows: gl.constexpr = gl.SliceLayout(1, left.type.layout)
    left = left * factor.load(rows)[:, None]
    right = right * factor.load(rows)[:, None]
    if ME == 0:
        total = total * factor.load(gl.SliceLayout(1, total.type.layout))[:, None]
    left = warpgroup_mma(p, near, left, is_async=True)
    right = warpgroup_mma(p, far, right, is_async=True)
    if ME == 0:
        total = warpgroup_mma(p, ones, total, is_async=True)
    return left, right, total


@gluon.jit
def send_first_pair(wide, thin, page_rows, tables, keys, ropes, full, records, items, turns, ME: gl.constexpr):
    """Sends for this group's columns of the first two pages; what next_page says of the third, and what follows."""
    turn, page = 0, 0
    for b in gl.static_range(2):
        line, here, turn, page = next_page(tables, page_rows, records, items, turn, turns, page)
        for c in gl.static_range(ME * 2, ME * 2 + 2):
            load_quarter(wide, line, full.index(b * 5 + c), keys.index(b * 4 + c), here, c)
        if b != ME:
            load_rope(thin, line, full.index(b * 5 + 4), ropes.index(b), here)
    return next_page(tables, page_rows, records, items, turn, turns, page)


@gluon.jit
def add_pair(
    weight, left, right, total, zero, wide, thin, page_rows, tables, keys, ropes, ones, factors, full, weighed, phase,
    records, items, turns, line, here, ahead, page, ME: gl.constexpr,
):  # fmt: skip
    """Adds both pages of a pair to this group's columns of A, and sends for those columns of the next pair."""
    for b in gl.static_range(2):
        near = keys.index(b * 4 + ME * 2 + zero)
        far = keys.index(b * 4 + ME * 2 + 1 + zero)
        if b == ME:
            left, right, total = add_page(weight, near, far, ones, factors.index(b), left, right, total, ME)
        else:
            mbarrier.wait(weighed.index(b), phase)
            p = ropes.index(b + zero)
            left, right, total = add_page(p, near, far, ones, factors.index(b), left, right, total, ME)
        # While the tensor cores work: where the page after the one that is now sent for lies.
        line_then, here_then, ahead, page = next_page(tables, page_rows, records, items, ahead, turns, page)
        left = warpgroup_mma_wait(2 - ME, deps=[left])
        load_quarter(wide, line, full.index(b * 5 + ME * 2), near, here, ME * 2)
        if ME == 0:
            right, total = warpgroup_mma_wait(0, deps=[right, total])
        else:
            right = warpgroup_mma_wait(0, deps=[right])
        load_quarter(wide, line, full.index(b * 5 + ME * 2 + 1), far, here, ME * 2 + 1)
        if b != ME:
            load_rope(thin, line, full.index(b * 5 + 4), ropes.index(b), here)
        line, here = line_then, here_then
    return left, right, total, line, here, ahead, page


@gluon.jit
def take_turns(
    q_wide, q_thin, wide, thin, page_rows, tables, queries, q_rope, keys, ropes, ones, factors, maxima, q_full, q_ready,
    full, raised, weighed, records, items, partial, highs, sums, scale, HEADS: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """What one group does: scores of page ME of every pair, and quarters 2 ME and 2 ME + 1 of A."""
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, score_layout))
    out_row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = ME * 256 + gl.arange(0, 128, gl.SliceLayout(0, layout))
    turns = turns_of(items)
    line, here, ahead, page = send_first_pair(
        wide, thin, page_rows, tables, keys, ropes, full, records, items, turns, ME
    )
    if ME == 0:
        load_queries(q_wide, q_thin, gl.load(records + item_of(0, items) * 8), queries, q_rope, q_full, turns > 0)
    phase = 0
    for turn in range(turns):
        record = records + item_of(turn, items) * 8
        place = gl.load(record + 1)
        start = gl.load(record + 2)
        end = gl.load(record + 3)
        key_first = gl.load(record + 4) + ME * 64
        slot = gl.load(record + 7).to(gl.int64) * 64
        inside = (end - start) * HEADS - place
        position = gl.where(row < inside, start + (place + row) // HEADS, -1)
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
        left = gl.zeros([64, 128], gl.float32, layout)
        right = gl.zeros([64, 128], gl.float32, layout)
        total = gl.zeros([64, 16], gl.float32, narrow)
        take_queries(queries, q_rope, q_full, q_ready, inside, turn & 1, ME)
        for pair in range((gl.load(record + 5) + 1) // 2):
            # 0, but of the loop: descriptors that do not change would all be kept in registers.
            zero = pair >> 24
            score = scores(queries, q_rope, keys, ropes, full, phase, end - key_first, zero, ME) * scale
            if (key_first + 63 > start + place // HEADS) | (inside < 64):
                key = key_first + gl.arange(0, 64, gl.SliceLayout(0, score_layout))
                score = gl.where(key[None, :] <= position[:, None], score, float("-inf"))
            weight = weigh(score, m, maxima, factors, ropes.index(ME), raised, weighed.index(ME), phase, ME)
            weight = gl.convert_layout(weight, gl.DotOperandLayout(0, layout, 2))
            left, right, total, line, here, ahead, page = add_pair(
                weight, left, right, total, zero, wide, thin, page_rows, tables, keys, ropes, ones, factors, full,
                weighed, phase, records, items, turns, line, here, ahead, page, ME,
            )  # fmt: skip
            if ME == 0:
                m = maxima.index(1).load(gl.SliceLayout(1, score_layout))
            key_first += 128
            phase ^= 1
        if ME == 0:
            # The odd group's last weights came after its last scores, so q is free.
            line_next = gl.load(records + item_of(turn + 1, items) * 8)
            load_queries(q_wide, q_thin, line_next, queries, q_rope, q_full, turn + 1 < turns)
            gl.store(highs + slot + row, m)
            gl.store(sums + slot + gl.arange(0, 64, gl.SliceLayout(1, narrow)), gl.max(total, axis=1))  # equal columns
        out = partial + (slot + out_row)[:, None] * 512 + column[None, :]
        gl.store(out, left, mask=(out_row < inside)[:, None])
        gl.store(out + 128, right, mask=(out_row < inside)[:, None])


@gluon.jit(do_not_specialize=["items", "page_rows"])
def hopper_kernel(
    q_wide, q_thin, page_wide, page_thin, tables, records, items, partial, maxima, sums, scale, page_rows,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Items of `records` in turns, each one block over one split: A, m and l of the rows that exist, all fp32."""
    layout: gl.constexpr = page_wide.layout
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], layout)
    keys = gl.allocate_shared_memory(gl.bfloat16, [8, 64, 128], layout)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], layout)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], flat)
    highs = gl.allocate_shared_memory(gl.float32, [2, 64], flat)
    one = gl.full([64, 16], 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
    ones = gl.allocate_shared_memory(gl.bfloat16, [64, 16], gl.NVMMASharedLayout(32, 16, 2), one)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    raised = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(raised, count=1)
    for quarter in gl.static_range(10):
        mbarrier.init(full.index(quarter), count=1)
    for b in gl.static_range(2):
        mbarrier.init(weighed.index(b), count=1)
    fence_async_shared()
    # Tuples written in place: named ones would lose what is known when the kernel is compiled.
    gl.warp_specialize(
        [
            (take_turns, (
                q_wide, q_thin, page_wide, page_thin, page_rows, tables, queries, q_rope, keys, ropes, ones, factors,
                highs, q_full, q_ready, full, raised, weighed, records, items, partial, maxima, sums, scale, HEADS, 0,
            )),
            (take_turns, (
                q_wide, q_thin, page_wide, page_thin, page_rows, tables, queries, q_rope, keys, ropes, ones, factors,
                highs, q_full, q_ready, full, raised, weighed, records, items, partial, maxima, sums, scale, HEADS, 1,
            )),
        ],
        [4],
        [256],
    )  # fmt: skip
