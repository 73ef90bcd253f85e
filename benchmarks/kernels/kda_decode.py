"""KDA decode, one token a session, beside fla's recurrent kernel and the floors of both ways."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.kda_cases import D, Inputs, make_inputs, make_state
from benchmarks.kernels import fla
from benchmarks.kernels.run import COPY_BYTES_A_US, OURS, Call, Case, Rows, Run, equal, timed
from benchmarks.record import Measurement
from forkpoint.kernels.kda.triton.launch import KdaState, OpenFactors, decode, prefill
from forkpoint.kernels.kda.triton.plan import decode_facts, prefill_plan
from forkpoint.limits import TILE_TOKENS

TARGETS = {
    (96, torch.float32): {1: 5.0, 16: 40.0, 64: 150.0, 256: 580.0},
    (96, torch.bfloat16): {64: 90.0},
}
"""Microseconds a layer, by batch."""
PREDICTED = {(1, torch.float32): "7", (64, torch.float32): "130 (row 5, factor 25, read 100)"}
BATCHES = (64, 16, 256, 1)
STEPS = TILE_TOKENS
"""Steps of a comparison, each over other slots, which are at all places of their tiles: one of 16 rows closes a tile,
and a small batch does not live in the L2 cache."""


def floors(batch: int, heads: int, pool: torch.dtype) -> tuple[float, float]:
    """Microseconds to read S once and write it once in 16 steps; and to read and write it in each."""
    once = batch * heads * D * D * pool.itemsize / COPY_BYTES_A_US
    return once * (1 + 1 / TILE_TOKENS), once * 2


def place_of(slot: int) -> int:
    """Row of its tile that a slot comes to next: all 16 places are equally frequent, and slot 0 closes a tile."""
    return TILE_TOKENS - 1 - slot % TILE_TOKENS


def filled(run: Run, inputs: Inputs, slots: int, pool: torch.dtype) -> KdaState:
    """A pool whose slots have consumed one tile and then the rows before their place, each the same tokens."""
    heads = inputs.heads
    state = make_state(slots, heads, run.device, pool)
    for tensor in (state.S, state.conv_ring, state.conv_grid):
        tensor.zero_()
    most = 2 * TILE_TOKENS
    tokens = make_inputs(most, heads, inputs.weights.lower_bound, run.device)
    lengths = [TILE_TOKENS + place_of(slot) for slot in range(slots)]
    bounds = [sum(lengths[:n]) for n in range(slots + 1)]
    x, z, b = (torch.cat([part[:length] for length in lengths]) for part in (tokens.x, tokens.z, tokens.b))
    prefill(x, z, b, inputs.weights, state, prefill_plan(list(range(slots)), bounds, [0] * slots, run.device))
    return state


def steps_over(slots: int, batch: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Slots and positions of each step's rows: places in turn, whichever slots have them."""
    order = torch.Generator().manual_seed(batch)
    found = []
    for step in range(count):
        mixed = torch.randperm(slots, generator=order).tolist()
        by_place = [[slot for slot in mixed if place_of(slot) == place] for place in range(TILE_TOKENS)]
        wanted = [TILE_TOKENS - 1 - (n + step) % TILE_TOKENS for n in range(batch)]
        chosen = [by_place[place].pop() for place in wanted]
        found.append((chosen, [TILE_TOKENS + place for place in wanted]))
    return found


def copied(state: KdaState, slots: list[int]) -> KdaState:
    """A state of these slots alone."""
    opened = OpenFactors(**{name: tensor[slots].clone() for name, tensor in vars(state.opened).items()})
    return KdaState(state.S[slots].clone(), opened, state.conv_ring[slots].clone(), state.conv_grid[slots].clone())


def alone_as_together(case: str, inputs: Inputs, state: KdaState, slots: list[int], places: list[int]) -> Measurement:
    """Rows of a batch against the same rows one by one: o, and S where a tile closes."""
    batch, device = len(slots), inputs.x.device
    some = sorted({0, batch // 2, batch - 1, min(batch - 1, TILE_TOKENS - 1)})
    lone = copied(state, [slots[n] for n in some])
    together = decode(*inputs.rows(0, batch), inputs.weights, state, decode_facts(slots, places, device))
    pairs: list[tuple[Tensor, Tensor]] = []
    for slot, n in enumerate(some):
        facts = decode_facts([slot], [places[n]], device)
        pairs.append((together[n : n + 1], decode(*inputs.rows(n, n + 1), inputs.weights, lone, facts)))
    pairs.append((state.S[[slots[n] for n in some]], lone.S))
    return equal(case, "alone equals together", pairs)


def times(run: Run, heads: int, batch: int, pool: torch.dtype, lower_bound: float | None = -5.0) -> Rows:
    """One row of the table: ours from conv inputs, with all that a step does, fla's from conv outputs."""
    named = f"decode H{heads} batch {batch} {str(pool).removeprefix('torch.')}{'' if lower_bound else ' softplus'}"
    target = TARGETS.get((heads, pool), {}).get(batch) if lower_bound else None
    floor, recurrent = floors(batch, heads, pool)
    if run.dry:
        heads, batch = 1, 2
    inputs = make_inputs(batch, heads, lower_bound, run.device)
    slots = batch if run.dry else max(2 * batch, 2 * TILE_TOKENS)
    state = filled(run, inputs, slots, pool)
    steps = steps_over(slots, batch, 1 if run.dry else STEPS)
    same = alone_as_together(named, inputs, state, *steps[0])
    yield same
    if not same.value:
        return
    ours = partial(decode, *inputs.rows(0, batch), inputs.weights, state)
    contenders: dict[str, list[Call]] = {OURS: [partial(ours, decode_facts(*step, run.device)) for step in steps]}
    if not run.dry:
        try:
            contenders["fla recurrent"] = fla.recurrent(inputs, state.S.clone(), [chosen for chosen, _ in steps])
        except ImportError as error:
            print(f"no fla: {error}", flush=True)
    found = run.compare(contenders)
    peer = ("fla recurrent", found.get("fla recurrent"))
    predicted = PREDICTED.get((batch, pool)) if (heads, lower_bound) == (96, -5.0) else None
    yield timed(named, "a layer, conv inputs to o", found[OURS], peer, floor, target, predicted=predicted)
    yield Measurement(named, "floor of any recurrent kernel", "us", recurrent)
    if (heads, pool) == (96, torch.float32):
        for kernel, us in run.kernels(contenders[OURS][0]).items():
            yield Measurement(named, kernel, "us", us)


def cases(run: Run) -> list[Case]:
    """K3's heads over both pools, then Kimi Linear's."""
    found: list[Case] = []
    for pool in (torch.float32, torch.bfloat16):
        found += [(f"decode H96 {pool} {batch}", partial(times, run, 96, batch, pool)) for batch in BATCHES]
    for batch in (64, 256):
        found.append((f"decode H32 softplus {batch}", partial(times, run, 32, batch, torch.float32, None)))
    return found
