"""The split kernel on Hopper's own units: split.py's arithmetic, product for product, hence its bits.

Latents of 512 + 64 in bf16, blocks of 64 (token, head) rows. Three warp groups share a persistent program: one scores
a page and makes its weights p, two hold 256 columns of A each (128 registers a thread). Quarters of a page come by TMA
into one of two buffers; a value group that is done with a quarter sends for that of the page after next, also across
items. So the tensor cores see the scores of one page beside the values of the page before it, and a page is read from
memory once a block and lies in shared memory once, for q k and p V alike.

| in shared memory | bytes |
| --- | --- |
| q, 64 x 576 | 73,728 |
| two pages, 64 x 576 each | 147,456 |
| p, 64 x 64 | 8,192 |
| factors 2^(m - m'), ones, barriers | 2,880 |

Who waits for whom: `full` (TMA has filled a quarter), `factored` (2^(m - m') of a page is there), `weighed` (p is
there), `taken` (both value groups are done with p). Two `factored` barriers, since scores run a page ahead of the
values: a barrier that could pass two phases unseen would deadlock.

What binds it on an H200 is inside a multiprocessor. A page takes about 3,830 cycles (ncu), of which the tensor cores
work 54 %: the same when pages arrive in halves or in quarters, from memory or from the L2 cache, and much the same
for one sequence as for 64. The likely cause, not yet shown: the 36 products of a page's scores are one chain, each on
the sums of the one before, and its weights wait for the end of it. Two chains would need sums of another order.
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
def load_queries(wide, thin, line, queries, q_rope, full, here):
    """Sends for the 64 rows of q from `line` on; rows behind the end of the tensor come as 0."""
    mbarrier.expect(full, 64 * 576 * 2, pred=here)
    for c in gl.static_range(4):
        tma.async_copy_global_to_shared(wide, [line, c * 128], full, queries.index(c), pred=here)
    tma.async_copy_global_to_shared(thin, [line, 512], full, q_rope, pred=here)


@gluon.jit
def load_quarter(wide, thin, row, full, quarter, rope, here, C: gl.constexpr):
    """Sends for 128 columns of a page's latents, and with the last for the other 64."""
    if C == 3:
        mbarrier.expect(full, 64 * 192 * 2, pred=here)
        tma.async_copy_global_to_shared(thin, [row, 512], full, rope, pred=here)
    else:
        mbarrier.expect(full, 64 * 128 * 2, pred=here)
    tma.async_copy_global_to_shared(wide, [row, C * 128], full, quarter, pred=here)


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
def score_group(
    q_wide, q_thin, queries, q_rope, keys, ropes, weights, factors, ones, q_full, full, factored, weighed, taken,
    records, items, maxima, sums, scale, HEADS: gl.constexpr,
):  # fmt: skip
    """Scores, maxima, weights and their sums of every page of this program's items."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    narrow_row = gl.arange(0, 64, gl.SliceLayout(1, narrow))
    step, turn, item_first = 0, 0, gl.program_id(0)
    load_queries(q_wide, q_thin, gl.load(records + item_first * 8), queries, q_rope, q_full, item_first < items)
    for item in range(item_first, items, gl.num_programs(0)):
        record = records + item * 8
        place = gl.load(record + 1)
        start = gl.load(record + 2)
        end = gl.load(record + 3)
        first_key = gl.load(record + 4)
        steps = gl.load(record + 5)
        slot = gl.load(record + 7).to(gl.int64) * 64
        item_next = item + gl.num_programs(0)
        line_next = gl.load(records + gl.minimum(item_next, items - 1) * 8)
        inside = (end - start) * HEADS - place
        position = gl.where(row < inside, start + (place + row) // HEADS, -1)
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        total = warpgroup_mma_init(gl.zeros([64, 16], gl.float32, narrow))
        mbarrier.wait(q_full, turn & 1)
        if inside < 64:
            # Rows of another sequence would change no bit here, but zeros cost the tensor cores less power.
            blank_all(queries, 0, q_rope, inside)
        for i in range(steps):
            stage = step & 1
            phase = (step >> 1) & 1
            key_first = first_key + i * 64
            rope = ropes.index(stage)
            if key_first + 64 > end:
                # Places without a token were never written: what lies there must not even meet a 0.
                for c in gl.static_range(4):
                    mbarrier.wait(full.index(stage * 4 + c), phase)
                blank_all(keys, stage * 4, rope, end - key_first)
            score = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout))
            for c in gl.static_range(4):
                mbarrier.wait(full.index(stage * 4 + c), phase)
                key = keys.index(stage * 4 + c).permute((1, 0))
                score = warpgroup_mma(queries.index(c), key, score, use_acc=c > 0, is_async=True)
            score = warpgroup_mma(q_rope, rope.permute((1, 0)), score, is_async=True)
            score, total = warpgroup_mma_wait(0, deps=[score, total])
            score = score * scale
            if (key_first + 63 > start + place // HEADS) | (inside < 64):
                place_of = key_first + gl.arange(0, 64, gl.SliceLayout(0, layout))
                score = gl.where(place_of[None, :] <= position[:, None], score, float("-inf"))
            highest = gl.maximum(m, gl.max(score, axis=1))
            finite = gl.where(highest == float("-inf"), 0.0, highest)
            factor = gl.exp2(m - finite)
            m = highest
            factors.index(stage).store(factor)
            mbarrier.arrive(factored.index(stage), count=1)
            if i + 1 == steps:  # the barrier above says that all warps are done with q
                load_queries(q_wide, q_thin, line_next, queries, q_rope, q_full, item_next < items)
            weight = gl.exp2(score - finite[:, None]).to(gl.bfloat16)
            total = total * gl.convert_layout(factor, gl.SliceLayout(1, narrow))[:, None]
            mbarrier.wait(taken, (step & 1) ^ 1)
            weights.store(weight)
            fence_async_shared()
            mbarrier.arrive(weighed, count=1)
            total = warpgroup_mma(weights, ones, total, is_async=True)
            step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        gl.store(maxima + slot + row, m)
        gl.store(sums + slot + narrow_row, gl.max(total, axis=1))  # all columns are equal
        turn += 1  # noqa: SIM113 - the compiler knows no enumerate


@gluon.jit
def next_page(tables, page_rows, records, items, ahead, page):
    """First line of page `page` of item `ahead`, whether there is one, and the item and page that follow."""
    record = records + gl.minimum(ahead, items - 1) * 8
    line = gl.load(tables + gl.load(record + 6) + page) * page_rows
    here = ahead < items
    done = page + 1 >= gl.load(record + 5)
    return line, here, gl.where(done, ahead + gl.num_programs(0), ahead), gl.where(done, 0, page + 1)


@gluon.jit
def value_group(
    wide, thin, page_rows, tables, keys, ropes, weights, factors, full, factored, weighed, taken, records, items,
    partial, HALF: gl.constexpr,
):  # fmt: skip
    """256 columns of A of this program's items, and the loads of those columns of their pages, two pages ahead."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, 128, gl.SliceLayout(0, layout))
    item_first = gl.program_id(0)
    ahead = item_first
    page = 0
    for buffer in gl.static_range(2):
        line, here, ahead, page = next_page(tables, page_rows, records, items, ahead, page)
        for c in gl.static_range(2):
            place = buffer * 4 + HALF * 2 + c
            load_quarter(
                wide, thin, line, full.index(place), keys.index(place), ropes.index(buffer), here, HALF * 2 + c
            )
    line, here, ahead, page = next_page(tables, page_rows, records, items, ahead, page)
    step = 0
    for item in range(item_first, items, gl.num_programs(0)):
        steps = gl.load(records + item * 8 + 5)
        slot = gl.load(records + item * 8 + 7).to(gl.int64) * 64
        left = gl.zeros([64, 128], gl.float32, layout)
        right = gl.zeros([64, 128], gl.float32, layout)
        for _ in range(steps):
            stage = step & 1
            place = stage * 4 + HALF * 2
            mbarrier.wait(factored.index(stage), (step >> 1) & 1)
            factor = factors.index(stage).load(gl.SliceLayout(1, layout))
            left = left * factor[:, None]
            right = right * factor[:, None]
            mbarrier.wait(weighed, step & 1)
            left = warpgroup_mma(weights, keys.index(place), left, is_async=True)
            right = warpgroup_mma(weights, keys.index(place + 1), right, is_async=True)
            # While the tensor cores work: where the page after the one that is now sent for lies.
            line_then, here_then, ahead, page = next_page(tables, page_rows, records, items, ahead, page)
            left = warpgroup_mma_wait(1, deps=[left])
            rope = ropes.index(stage)
            load_quarter(wide, thin, line, full.index(place), keys.index(place), rope, here, HALF * 2)
            right = warpgroup_mma_wait(0, deps=[right])
            mbarrier.arrive(taken, count=1)
            load_quarter(wide, thin, line, full.index(place + 1), keys.index(place + 1), rope, here, HALF * 2 + 1)
            line = line_then
            here = here_then
            step += 1
        out = partial + (slot + row)[:, None] * 512 + (HALF * 256 + column)[None, :]
        gl.store(out, left)
        gl.store(out + 128, right)


@gluon.jit(do_not_specialize=["items", "page_rows"])
def hopper_kernel(
    q_wide, q_thin, page_wide, page_thin, tables, records, items, partial, maxima, sums, scale, page_rows,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Items `program`, `program + programs`, ... of `records`, each one block over one split: A, m and l, all fp32."""
    layout: gl.constexpr = page_wide.layout
    queries = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], layout)
    keys = gl.allocate_shared_memory(gl.bfloat16, [8, 64, 128], layout)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], layout)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], layout)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    one = gl.full([64, 16], 1.0, gl.bfloat16, blocked)
    ones = gl.allocate_shared_memory(gl.bfloat16, [64, 16], gl.NVMMASharedLayout(32, 16, 2), one)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    factored = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(weighed, count=1)
    mbarrier.init(taken, count=2)
    for quarter in gl.static_range(8):
        mbarrier.init(full.index(quarter), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(factored.index(buffer), count=1)
    fence_async_shared()
    LOW: gl.constexpr = 0
    HIGH: gl.constexpr = 1
    score = (
        q_wide, q_thin, queries, q_rope, keys, ropes, weights, factors, ones, q_full, full, factored, weighed, taken,
        records, items, maxima, sums, scale, HEADS,
    )  # fmt: skip
    low = (
        page_wide, page_thin, page_rows, tables, keys, ropes, weights, factors, full, factored, weighed, taken,
        records, items, partial, LOW,
    )  # fmt: skip
    high = (
        page_wide, page_thin, page_rows, tables, keys, ropes, weights, factors, full, factored, weighed, taken,
        records, items, partial, HIGH,
    )  # fmt: skip
    # 3 x 128 threads of 168 registers: what the file has, so no group needs to give any up.
    gl.warp_specialize([(score_group, score), (value_group, low), (value_group, high)], [4, 4], [168, 168])
