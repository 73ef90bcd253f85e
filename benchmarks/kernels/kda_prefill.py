"""KDA prefill, conv inputs to o and S, beside fla's chunk_kda from conv outputs and with its conv before it."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.kda_cases import GATES, D, Inputs, fp64_answer, make_inputs, make_state, prefill_then_decode
from benchmarks.kernels import fla
from benchmarks.kernels.run import COPY_BYTES_A_US, OURS, Call, Case, Mode, Rows, Run, copies, equal, off, timed
from benchmarks.record import Measurement
from forkpoint.kernels.kda.triton.launch import PINNED, KdaState, prefill
from forkpoint.kernels.kda.triton.plan import prefill_plan

MIXED = [300, 700, 1200, 1500, 2000, 2492]
SHAPES: dict[str, tuple[int, list[int], float | None, float | None]] = {
    "H96 T8192": (96, [8192], -5.0, 1200.0),
    "H96 T512": (96, [512], -5.0, 190.0),
    "H96 T2048": (96, [2048], -5.0, 420.0),
    "H96 8x1024": (96, [1024] * 8, -5.0, 1100.0),
    "H96 6 mixed, 8192": (96, MIXED, -5.0, 1200.0),
    "H32 T8192": (32, [8192], -5.0, 800.0),
    "H96 T32768": (96, [32768], -5.0, 4500.0),
    "H32 T8192 softplus": (32, [8192], None, None),
    "H32 T512": (32, [512], -5.0, None),
    "H32 T2048": (32, [2048], -5.0, None),
    "H32 T32768": (32, [32768], -5.0, None),
}
"""Name: heads, lengths, lower bound of the gate (None: softplus), target in microseconds."""
PREDICTED = {"H96 T8192": "1.2-1.4 (row kernel 0.3-0.5, prepare 0.3, recur at least 0.6)"}
ERRORS = {"o": 5e-3, "S": 3.6e-3}
WARMING = ("H96 T8192", "H96 8x1024", "H32 T8192", "H32 T8192 softplus")
"""These compile and tune what the others use too."""
PEERS = ("fla chunk_kda", "fla conv + chunk_kda")
METRIC = "conv inputs to o and S"


def floor_us(heads: int, lengths: list[int]) -> float:
    """Bytes that any implementation moves: conv inputs, gates and betas in, o out, states in and out."""
    rows = sum(lengths) * heads * (5 * D * 2 + 2)
    return (rows + len(lengths) * heads * D * D * 8) / COPY_BYTES_A_US


def fresh(sequences: int, heads: int, device: torch.device) -> KdaState:
    """Slots 1 to `sequences`, with S and the conv's last inputs zero."""
    state = make_state(sequences + 1, heads, device)
    for tensor in (state.S, state.conv_ring, state.conv_grid):
        tensor.zero_()
    return state


def consume(inputs: Inputs, state: KdaState, slots: list[int], lengths: list[int], starts: list[int]) -> Tensor:
    plan = prefill_plan(slots, [sum(lengths[:n]) for n in range(len(lengths) + 1)], starts, inputs.x.device)
    return prefill(inputs.x, inputs.z, inputs.b, inputs.weights, state, plan)


def part_of(inputs: Inputs, first: int, last: int) -> Inputs:
    return Inputs(*inputs.rows(first, last), inputs.weights)


def cut_or_alone(case: str, inputs: Inputs, lengths: list[int]) -> Measurement:
    """One sequence cut inside a tile, or the last of several alone, against the whole batch: o and S."""
    device, heads, total = inputs.x.device, inputs.heads, sum(lengths)
    whole, other = fresh(len(lengths), heads, device), fresh(1, heads, device)
    o = consume(inputs, whole, list(range(1, len(lengths) + 1)), lengths, [0] * len(lengths))
    if len(lengths) == 1:
        at = total // 2 + 5
        left = consume(part_of(inputs, 0, at), other, [1], [at], [0])
        right = consume(part_of(inputs, at, total), other, [1], [total - at], [at])
        return equal(case, "cut equals whole", [(o, torch.cat((left, right))), (whole.S[1], other.S[1])])
    alone = consume(part_of(inputs, total - lengths[-1], total), other, [1], lengths[-1:], [0])
    return equal(case, "alone equals packed", [(o[total - lengths[-1] :], alone), (whole.S[-1], other.S[1])])


def equality(run: Run, gate: str) -> Rows:
    """Is decode's every bit prefill's, and how far are o and S from the recurrence in fp64?"""
    tokens, heads = (32, 1) if run.dry else (512, 8)
    torch.manual_seed(7)
    inputs = make_inputs(tokens, heads, GATES[gate], run.device)
    case = f"kda {gate}"
    whole = prefill_then_decode(inputs, tokens, PINNED)
    decoded = prefill_then_decode(inputs, 27 if run.dry else tokens - 200 - 5, PINNED)
    yield equal(case, "decode equals prefill", list(zip(whole, decoded, strict=True)))
    for name, ours, exact in zip(("o", "S"), whole, fp64_answer(inputs), strict=True):
        yield Measurement(case, f"{name} against fp64", "error", off(ours, exact), target=ERRORS[name])


def times(run: Run, name: str) -> Rows:
    """One row of the table: the device's time and a caller's, each beside fla without and with its conv."""
    heads, lengths, lower_bound, target = SHAPES[name]
    if run.dry:
        heads, lengths = 1, [20, 24][: len(lengths)]
    case, total = f"prefill {name}", sum(lengths)
    each = copies(total * heads * D * 8)
    sets = [make_inputs(total, heads, lower_bound, run.device) for _ in range(1 if run.dry else each)]
    same = cut_or_alone(case, sets[0], lengths)
    yield same
    if not same.value:
        return
    state, slots = make_state(len(lengths) + 1, heads, run.device), list(range(1, len(lengths) + 1))
    plan = prefill_plan(slots, [sum(lengths[:n]) for n in range(len(lengths) + 1)], [0] * len(lengths), run.device)
    ours: list[Call] = [partial(prefill, i.x, i.z, i.b, i.weights, state, plan) for i in sets]
    contenders = {OURS: ours}
    if not run.dry:
        contenders |= peers(sets, lengths)
    floor = floor_us(heads, lengths)
    for captured, suffix in ((True, ""), (False, ", called from Python")):
        found = run.compare(contenders, captured)
        # The target is the device's time; the prediction was made for it.
        aim, expected = (target, PREDICTED.get(name)) if captured else (None, None)
        for peer in PEERS:
            row = timed(case, METRIC + suffix, found[OURS], (peer, found.get(peer)), floor, aim, "ms", expected)
            if peer == PEERS[0] or row.peer:
                yield row
    if name in ("H96 T8192", "H32 T8192"):
        for kernel, us in run.kernels(ours[0]).items():
            yield Measurement(case, kernel, "ms", us / 1e3)


def peers(sets: list[Inputs], lengths: list[int]) -> dict[str, list[Call]]:
    """fla's calls on the same rows; none where fla is not installed."""
    try:
        return {
            PEERS[0]: [fla.chunk(inputs, lengths) for inputs in sets],
            PEERS[1]: [fla.conv_and_chunk(inputs, lengths) for inputs in sets],
        }
    except ImportError as error:
        print(f"no fla: {error}", flush=True)
        return {}


def exports(run: Run) -> Rows:
    """What boundary states cost: S written as fp32 to a pool of checkpoints every 8192 or every 1024 tokens."""
    heads, tokens, steps = (1, 48, (48, 16)) if run.dry else (96, 8192, (8192, 1024))
    case = "prefill H96 T8192"
    inputs, state = make_inputs(tokens, heads, -5.0, run.device), make_state(2, heads, run.device)
    arguments = (inputs.x, inputs.z, inputs.b, inputs.weights, state)
    contenders: dict[str, list[Call]] = {
        OURS: [partial(prefill, *arguments, prefill_plan([1], [0, tokens], [0], run.device))]
    }
    for step in steps:
        wanted = {(0, at): row for row, at in enumerate(range(step, tokens + 1, step))}
        pool = torch.empty(len(wanted), heads, D, D, device=run.device)
        plan = prefill_plan([1], [0, tokens], [0], run.device, wanted)
        contenders[str(step)] = [partial(prefill, *arguments, plan, pool)]
        contenders[str(step)][0]()
        yield equal(case, f"checkpoint at the end is S, every {step}", [(pool[-1], state.S[1])])
    found = run.compare(contenders)
    for step in steps:
        cost = 100 * (found[str(step)].p50 / found[OURS].p50 - 1)
        yield Measurement(case, f"checkpoints every {step}", "%", cost, target=3.0)


def cases(run: Run) -> list[Case]:
    """Errors and equality, then one case a shape."""
    names = WARMING if run.mode is Mode.WARM else tuple(SHAPES)
    shapes: list[Case] = [(f"prefill {name}", partial(times, run, name)) for name in names]
    return [
        *((f"kda {gate}", partial(equality, run, gate)) for gate in GATES),
        *shapes[:1],
        ("prefill exports", partial(exports, run)),
        *shapes[1:],
    ]
