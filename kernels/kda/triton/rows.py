"""Row kernel: short conv with SiLU, L2 norms, log2 gate and beta in one pass; and what a prefill keeps of its end.

One compiled kernel serves prefill and decode, told apart by run-time arguments only: the sums of the L2 norms follow
the layout that the compiler picks, so two specialisations might round differently.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GATE_ONE = tl.constexpr(4194304.0)
GATE_FLOOR = tl.constexpr(-24.0)
NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log2_gate(z, rate, lower_bound, BOUNDED: tl.constexpr):
    """int32 in units of 2^-22, <= 0; see kda_gate in naive.py. rate = exp(A_log)."""
    if BOUNDED:
        gate = sigmoid(z * rate) * (lower_bound * LOG2_E)
    else:
        # log1p(w) as log2(u) w / (u - 1), u = 1 + w: 1 + w alone would drop the digits of slow channels.
        w = tl.exp(-tl.abs(z))
        u = 1.0 + w
        tail = tl.where(u == 1.0, w, tl.log2(u) * LN2 * (w / tl.where(u == 1.0, 1.0, u - 1.0)))
        gate = tl.maximum((tl.maximum(z, 0.0) + tail) * (rate * -LOG2_E), GATE_FLOOR)
    return tl.floor(gate * GATE_ONE + 0.5).to(tl.int32)


@triton.jit
def row_gates(z, A_log, dt_bias, at, head, lower_bound, BOUNDED: tl.constexpr):
    """log2_gate of rows [R, 128] from raw z; `at` = (row, row stride / 8, mask). Elementwise, so the kernels that need
    gates form them again, from half the bytes of an int32."""
    row, step, mask = at
    channel = head * 128 + tl.arange(0, 128)[None, :]
    raw = tl.load(z + (row * step * 8)[:, None] + channel, mask=mask[:, None], other=0.0).to(tl.float32)
    return log2_gate(raw + tl.load(dt_bias + channel), tl.exp(tl.load(A_log + head)), lower_bound, BOUNDED)


@triton.jit
def conv_silu(x, weight, ring, grid, at, channel, channels):
    """silu(conv) [BR, 128] fp32 of the channels; `at` = (row, row stride, slot, position, start, live, single).

    Inputs before `start` come from the ring, at addresses picked before the load. With `single` rows write both tails:
    the place that a row writes is not one of the three that it reads, and no other program reads these channels.
    """
    row, stride, slot, position, start, live, single = at
    column = channel[None, :]
    total = tl.zeros((row.shape[0], channel.shape[0]), tl.float32)
    for tap in tl.static_range(4):
        p = position - 3 + tap
        place = (slot * 4 + (p & 3))[:, None] * channels + column
        source = x + ((row - 3 + tap) * stride)[:, None] + column
        if tap < 3:
            source = tl.where((p >= start)[:, None], source, ring + place)
        value = tl.load(source, mask=(live & (p >= 0))[:, None], other=0.0)
        if single != 0:
            if tap > 0:
                closes = (live & ((position & 15) == 15))[:, None]
                tl.store(grid + (slot * 3 + tap - 1)[:, None] * channels + column, value, mask=closes)
            if tap == 3:
                tl.store(ring + place, value, mask=live[:, None])
        taps = tl.load(weight + tap * channels + channel).to(tl.float32)
        total = tl.fma(value.to(tl.float32), tl.broadcast_to(taps[None, :], total.shape), total)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def l2_normed(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + NORM_EPS)[:, None]


@triton.jit(do_not_specialize=["count", "single", "x_step", "z_step", "b_stride"], do_not_specialize_on_alignment=["b"])
def row_kernel(
    x,
    z,
    b,
    weight,
    A_log,
    dt_bias,
    ring,
    grid,
    facts,
    q_out,
    k_out,
    v_out,
    g_out,
    beta_out,
    count,
    single,
    x_step,
    z_step,
    b_stride,
    lower_bound,
    scale,
    H: tl.constexpr,
    BOUNDED: tl.constexpr,
    BR: tl.constexpr,
):
    """Grid (R / BR, H). x [R, 3 H 128] conv inputs (q, k, v), z [R, H 128], b [R, H], facts [R, 3] int32: slot,
    position, first new position of the row's sequence.

    k, v, beta go to [R, H, ...] or, with `single` (every sequence is one row), to [slots, 16, H, ...] at position % 16;
    then the gates go there too, and the conv tails move on. q goes to [R, H, 128] always, normalised and scaled. Slots
    below 0 do nothing. x_step and z_step are row strides in units of 8, so that the compiler sees what it may load at
    once.
    """
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    head = tl.program_id(1)
    key = tl.arange(0, 128)
    inside = row < count
    slot = tl.load(facts + row * 3, mask=inside, other=-1).to(tl.int64)
    position = tl.load(facts + row * 3 + 1, mask=inside, other=0)
    start = tl.load(facts + row * 3 + 2, mask=inside, other=0)
    live = slot >= 0
    at = (row, x_step.to(tl.int64) * 8, slot, position, start, live, single)
    channel, channels = head * 128 + key, H * 384
    q = conv_silu(x, weight, ring, grid, at, channel, channels)
    k = conv_silu(x, weight, ring, grid, at, H * 128 + channel, channels)
    v = conv_silu(x, weight, ring, grid, at, H * 256 + channel, channels)
    beta = sigmoid(tl.load(b + row * b_stride + head, mask=live, other=0.0).to(tl.float32))
    to = tl.where(live & (single != 0), slot * 16 + (position & 15), row) * H + head
    place = to[:, None] * 128 + key[None, :]
    # Rounded here, so that a pool of fp32 rows holds the same numbers.
    normed_k = l2_normed(k).to(tl.bfloat16)
    normed_q = (l2_normed(q) * scale).to(tl.bfloat16)
    tl.store(q_out + (row * H + head)[:, None] * 128 + key[None, :], normed_q, mask=live[:, None])
    tl.store(k_out + place, normed_k.to(k_out.dtype.element_ty), mask=live[:, None])
    tl.store(v_out + place, v.to(tl.bfloat16).to(v_out.dtype.element_ty), mask=live[:, None])
    if single != 0:
        gate = row_gates(z, A_log, dt_bias, (row, z_step, live), head, lower_bound, BOUNDED)
        tl.store(g_out + place, gate, mask=live[:, None])
    tl.store(beta_out + to, beta, mask=live)


@triton.jit
def keep_conv(x, ring, grid, slot, first_row, start, end, channel, x_stride, channels):
    """Both conv tails after a prefill: the grid tail first, for it may need inputs that the ring then forgets."""
    closed = end // 16 * 16
    for i in tl.static_range(3):
        p = closed - 3 + i
        moved = closed > start
        fresh = tl.load(x + (first_row + p - start) * x_stride + channel, mask=moved & (p >= start), other=0.0)
        kept = tl.load(ring + (slot * 4 + (p & 3)) * channels + channel, mask=moved & (p < start) & (p >= 0), other=0.0)
        value = tl.where(p >= start, fresh, kept)
        tl.store(grid + (slot * 3 + i) * channels + channel, value, mask=moved)
    tl.debug_barrier()
    for i in tl.static_range(4):
        p = end - 4 + i
        fresh = tl.load(x + (first_row + p - start) * x_stride + channel, mask=p >= start, other=0.0)
        tl.store(ring + (slot * 4 + (p & 3)) * channels + channel, fresh, mask=p >= start)


@triton.jit(do_not_specialize=["x_stride", "z_step"])
def keep_kernel(
    x,
    z,
    A_log,
    dt_bias,
    ring,
    grid,
    sequences,
    k_new,
    v_new,
    beta_new,
    k_open,
    v_open,
    g_open,
    beta_open,
    x_stride,
    z_step,
    lower_bound,
    H: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Grid (N, H), after everything that reads the slots: conv tails, and the rows of the tile that stays open.

    sequences [N, 5] int32: slot, first row, start, end, first tile.
    """
    n, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(sequences + n * 5).to(tl.int64)
    first_row = tl.load(sequences + n * 5 + 1).to(tl.int64)
    start, end = tl.load(sequences + n * 5 + 2), tl.load(sequences + n * 5 + 3)
    if (slot >= 0) & (end > start):
        key, place = tl.arange(0, 128), tl.arange(0, 16)
        for part in tl.static_range(3):
            channel = (part * H + head) * 128 + key
            keep_conv(x, ring, grid, slot, first_row, start, end, channel, x_stride, H * 384)
        position = end // 16 * 16 + place
        stays = (position >= start) & (position < end)
        source = (first_row + position - start) * H + head
        target = (slot * 16 + place) * H + head
        old, new = source[:, None] * 128 + key[None, :], target[:, None] * 128 + key[None, :]
        tl.store(k_open + new, tl.load(k_new + old, mask=stays[:, None]), mask=stays[:, None])
        tl.store(v_open + new, tl.load(v_new + old, mask=stays[:, None]), mask=stays[:, None])
        at = (first_row + position - start, z_step, stays)
        tl.store(g_open + new, row_gates(z, A_log, dt_bias, at, head, lower_bound, BOUNDED), mask=stays[:, None])
        tl.store(beta_open + target, tl.load(beta_new + source, mask=stays), mask=stays)
