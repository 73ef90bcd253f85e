"""Load, prefill and decode of a model folder: `python -m benchmarks.serving --model DIR --device cuda`.

Load time stands beside reading the same files and nothing else; prefill and decode beside the time in which their bytes
could go through the device's memory, at the rate of a copy in the same run. Cases that the device has no room for are
left out and named. Times of a CPU say nothing of a GPU's: the result names the machine.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `forkpoint serve` does, before torch is imported

import torch

from benchmarks.record import RESULTS, Measurement, known_commit, machine, save
from benchmarks.serving.disk import cached_share, forget, read_seconds, weight_files
from benchmarks.serving.floor import copy_rate, synchronize
from benchmarks.serving.rates import Plan, Rates
from forkpoint.limits import PREFILL_CHUNK_TOKENS_DEFAULT
from forkpoint.model.config import ModelConfig
from forkpoint.model.loading import LoadedModel, load_model
from forkpoint.server.engine.open import THREADS_DEFAULT, engine_of

STEP_BYTES = 8 << 30
"""Left free on a GPU for what a step needs for its rows."""


def load(folder: Path, device: torch.device) -> tuple[LoadedModel, list[Measurement]]:
    """The model, and how long it took beside a mere read of its files."""
    files = weight_files(folder)
    nbytes = sum(path.stat().st_size for path in files)
    forget(files)
    share = cached_share(files)
    read = read_seconds(files)
    forget(files)
    began = time.perf_counter()
    model = load_model(folder, str(device))
    synchronize(device)
    taken = time.perf_counter() - began
    how = "cache unknown" if share is None else f"{share:.0%} cached"
    case = f"{folder.name}, {nbytes / 1e9:,.2f} GB in {len(files)} files, {how}"
    rows = [
        Measurement(case, "load", "s", taken, floor=read),
        Measurement(case, "load", "GB/s", nbytes / 1e9 / taken, floor=nbytes / 1e9 / read),
    ]
    return model, rows


def room_for(model: LoadedModel, device: torch.device, plan: Plan) -> tuple[list[tuple[int, int]], int, int]:
    """(context, batch) of the cases that fit, and the slots and pages of the largest of them."""
    slot, page = model.layout.slot_bytes(), model.layout.page_bytes()
    free = torch.cuda.mem_get_info(device)[0] - STEP_BYTES if device.type == "cuda" else sys.maxsize
    cases, slots, pages = [], 1, plan.pages(plan.contexts[-1], 1)
    for context in plan.contexts:
        for batch in plan.batches:
            more_slots, more_pages = max(slots, batch), max(pages, plan.pages(context, batch))
            if more_slots * slot + more_pages * page > free:
                print(f"no room for {batch:,} sequences of {context:,}: left out", file=sys.stderr, flush=True)
                continue
            cases.append((context, batch))
            slots, pages = more_slots, more_pages
    return cases, slots, pages


def measure(folder: Path, device: torch.device, plan: Plan) -> Iterator[Measurement]:
    """Everything, row by row."""
    rate = copy_rate(device)
    yield Measurement(f"{device.type} memory", "copy, read and written", "GB/s", rate / 1e9)
    model, rows = load(folder, device)
    yield from rows
    cases, slots, pages = room_for(model, device, plan)
    rates = Rates(folder.name, model, engine_of(model, str(device), slots, pages), plan, rate)
    for context in plan.contexts:
        for chunk in (chunk for chunk in plan.chunks if chunk <= max(context, plan.chunks[0])):
            found, captured = rates.prefill(context, chunk)
            yield from found
        for batch in (batch for where, batch in cases if where == context):
            yield from rates.decode(captured, batch)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(sorted({int(part) for part in text.split(",")}))
    if numbers[0] < 1:
        raise ValueError(text)
    return numbers


def main() -> int:
    """Print each row and write all to the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="model folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--contexts", type=_numbers, default="1024,8192,32768", help="tokens, with commas between")
    parser.add_argument("--batches", type=_numbers, default="1,4,16,64", help="sequences, with commas between")
    parser.add_argument(
        "--chunks", type=_numbers, default=str(PREFILL_CHUNK_TOKENS_DEFAULT), help="prompt tokens of a step, likewise"
    )
    parser.add_argument("--steps", type=int, default=64, help="timed steps of decode")
    parser.add_argument("--runs", type=int, default=3, help="timed prefills")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of serving.jsonl")
    parser.add_argument("--commit", help="name of the commit, where git can't say it")
    given = parser.parse_args()
    plan = Plan(given.contexts, given.batches, given.chunks, given.steps, given.runs)
    if problem := plan.problem(ModelConfig.from_folder(given.model).context_limit):
        parser.error(problem)
    torch.set_num_threads(THREADS_DEFAULT)
    device = torch.device(given.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()
    rows: list[Measurement] = []
    for row in measure(given.model, device, plan):
        rows.append(row)
        floor = "" if row.floor is None else f"floor {row.floor:,.4g}"
        print(f"{row.case:60} {row.metric:24} {row.value:14,.4g} {row.unit:9} {floor}", flush=True)
        save("serving", rows, f"{where}, torch {torch.__version__}", given.commit or known_commit(), given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
