"""The serial pass on Hopper's own units: recur.py's arithmetic, product for product, hence its bits.

What Triton's own pipeline leaves on the chain from one tile's S to the next, and this does not: q+ S^T and O run beside
U and the fold, v comes as an asynchronous copy like all else, o leaves a tile later, and one barrier a tile is enough.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def send_for_tile(buffers, sources, sequence, t, stage, head, first_value, H: gl.constexpr, BV: gl.constexpr):
    """Asynchronous copies of a tile's factors, matrices, decay and v into a stage's buffers, one group."""
    kqs, rests, inverses, outputs, decays, values = buffers
    kq_in, rest_in, inverse_in, outputs_in, decay_in, v_new, v_open = sources
    slot, first_row, start, end, first_tile = sequence
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    square: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    block: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = (first_tile + t) * H + head
    key = gl.arange(0, 128, gl.SliceLayout(0, wide))[None, :]
    pair = gl.arange(0, 32, gl.SliceLayout(1, wide))[:, None] * 128 + key
    async_copy.async_copy_global_to_shared(kqs.index(stage), kq_in + at * 4096 + pair)
    tile = gl.arange(0, 16, gl.SliceLayout(1, wide))[:, None] * 128 + key
    async_copy.async_copy_global_to_shared(rests.index(stage), rest_in + at * 2048 + tile)
    row = gl.arange(0, 16, gl.SliceLayout(1, square))[:, None]
    place = at * 256 + row * 16 + gl.arange(0, 16, gl.SliceLayout(0, square))[None, :]
    async_copy.async_copy_global_to_shared(inverses.index(stage), inverse_in + place)
    async_copy.async_copy_global_to_shared(outputs.index(stage), outputs_in + place)
    async_copy.async_copy_global_to_shared(decays.index(stage), decay_in + at * 128 + gl.arange(0, 128, line))
    token = gl.arange(0, 16, gl.SliceLayout(1, block))
    position = start // 16 * 16 + t * 16 + token
    value = first_value + gl.arange(0, BV, gl.SliceLayout(0, block))[None, :]
    new_at = v_new + ((first_row + position - start) * H + head)[:, None] * 128 + value
    old_at = v_open + ((slot * 16 + token) * H + head)[:, None] * 128 + value
    mask = (position < end)[:, None] & (value >= 0)
    v_at = gl.where((position < start)[:, None], old_at, new_at)
    async_copy.async_copy_global_to_shared(values.index(stage), v_at, mask=mask)
    async_copy.commit_group()


@gluon.jit
def send_out(o, answers, sequence, t, head, first_value, H: gl.constexpr, BV: gl.constexpr):
    """Stores o of a tile's new rows from shared memory."""
    _, first_row, start, end, _ = sequence
    block: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    position = start // 16 * 16 + t * 16 + gl.arange(0, 16, gl.SliceLayout(1, block))
    value = first_value + gl.arange(0, BV, gl.SliceLayout(0, block))[None, :]
    row = ((first_row + position - start) * H + head)[:, None] * 128 + value
    mask = ((position >= start) & (position < end))[:, None] & (value >= 0)
    gl.store(o + row, answers.index(t & 1).load(block), mask=mask)


@gluon.jit
def begin_tile(state, buffers, stage):
    """S * 2^G_15, and k+ S^T and q+ S^T on their way; state [BV, 128] fp32."""
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    zero = gl.zeros([state.shape[0], 16], gl.float32, narrow)
    low = gl.convert_layout(state.to(gl.bfloat16), gl.DotOperandLayout(0, narrow, 2))
    decay = buffers[4].index(stage).load(gl.SliceLayout(0, state.type.layout))
    state = state * decay[None, :]
    kq = buffers[0].index(stage)
    read = warpgroup_mma(low, kq.slice(0, 16, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
    out = warpgroup_mma(low, kq.slice(16, 16, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
    return state, read, out


@gluon.jit
def end_tile(state, read, out, buffers, answer, stage):
    """S after the tile, and O in shared memory."""
    _, rests, inverses, outputs, _, values = buffers
    wide: gl.constexpr = state.type.layout
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    zero = gl.zeros([state.shape[0], 16], gl.float32, narrow)
    v = values.index(stage).permute((1, 0)).load(narrow).to(gl.float32)
    read = warpgroup_mma_wait(1, deps=[read])
    residual = gl.convert_layout((v - read).to(gl.bfloat16), operand)
    u = warpgroup_mma(residual, inverses.index(stage), zero, use_acc=False, is_async=True)
    u, out = warpgroup_mma_wait(0, deps=[u, out])
    u = u.to(gl.bfloat16)
    out = warpgroup_mma(gl.convert_layout(u, operand), outputs.index(stage), out, is_async=True)
    folded = gl.convert_layout(u, gl.DotOperandLayout(0, wide, 2))
    state = warpgroup_mma(folded, rests.index(stage), state, is_async=True)
    out = warpgroup_mma_wait(1, deps=[out])
    answer.permute((1, 0)).store(out.to(gl.bfloat16))
    return warpgroup_mma_wait(0, deps=[state])


@gluon.jit
def hopper_recur_kernel(
    tiles, sequences, v_new, kq_in, rest_in, inverse_in, outputs_in, decay_in, S, checkpoints, o, v_open,
    H: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """recur_kernel of recur.py on warp groups: grid (128 / BV, H, N), four warps for 64 values each."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 128, 16])
    half: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    small: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    first_value = gl.program_id(0) * BV
    head, n = gl.program_id(1), gl.program_id(2).to(gl.int64)
    slot = gl.load(sequences + n * 5).to(gl.int64)
    first_row = gl.load(sequences + n * 5 + 1).to(gl.int64)
    start, end = gl.load(sequences + n * 5 + 2), gl.load(sequences + n * 5 + 3)
    first_tile = gl.load(sequences + n * 5 + 4).to(gl.int64)
    buffers = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 32, 128], half),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 16, 128], half),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 16, 16], small),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 16, 16], small),
        gl.allocate_shared_memory(gl.float32, [STAGES, 128], plain),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 16, BV], rows),
    )
    answers = gl.allocate_shared_memory(gl.bfloat16, [2, 16, BV], rows)
    if (slot >= 0) & (end > start):
        closing, count = end // 16 - start // 16, (end + 15) // 16 - start // 16
        sequence = (slot, first_row, start, end, first_tile)
        sources = (kq_in, rest_in, inverse_in, outputs_in, decay_in, v_new, v_open)
        for ahead in gl.static_range(STAGES - 1):
            send_for_tile(buffers, sources, sequence, gl.minimum(ahead, count - 1), ahead, head, first_value, H, BV)
        place = (first_value + gl.arange(0, BV, gl.SliceLayout(1, layout)))[:, None] * 128
        place = place + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
        pool = S + (slot * H + head) * 16384 + place
        state = gl.load(pool).to(gl.float32)
        stage = 0
        for t in range(count):
            save = gl.load(tiles + (first_tile + t) * 2 + 1)
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            state, read, out = begin_tile(state, buffers, stage)
            # While the tensor cores work. Everyone is done with the tile before, so its buffers are free.
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            send_for_tile(
                buffers, sources, sequence, gl.minimum(t + STAGES - 1, count - 1), free, head, first_value, H, BV
            )
            if t > 0:
                send_out(o, answers, sequence, t - 1, head, first_value, H, BV)
            state = end_tile(state, read, out, buffers, answers.index(t & 1), stage)
            state = state.to(S.dtype.element_ty).to(gl.float32)
            if save >= 0:
                gl.store(checkpoints + (save.to(gl.int64) * H + head) * 16384 + place, state)
            # A tile that stays open folds rubbish into a state that nothing reads any more.
            if t == closing - 1:
                gl.store(pool, state.to(S.dtype.element_ty))
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        async_copy.wait_group(0)
        gl.thread_barrier()
        send_out(o, answers, sequence, count - 1, head, first_value, H, BV)
