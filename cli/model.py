"""`forkpoint model …`: make random models of published geometries, and look into model folders."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from forkpoint.cli import model_report
from forkpoint.cli.output import bytes_text, print_json
from forkpoint.model.geometries import GEOMETRIES
from forkpoint.model.geometry_sizes import GeometrySizes, sized_config
from forkpoint.model.plan import DTYPE_NAMES

if TYPE_CHECKING:
    from forkpoint.model.random_folder import RandomFolder

_Parser = argparse.ArgumentParser
SIZES = {
    "layers": "the first N layers of the published ones (default all)",
    "hidden": "hidden size; K3's experts read rows of half of it",
    "heads": "heads of KDA and of MLA layers",
    "ffn": "inner width of an expert; the dense first layer keeps its ratio to it",
    "experts": "routed experts of a layer",
    "vocab": "size of the vocabulary",
}


def add_parser(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    """Add `model` and its sub-verbs."""
    parser = verbs.add_parser("model", help="look into a model folder; make a random one of a published geometry")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    model_report.add_parser(actions)
    make = actions.add_parser(
        "make",
        help="write a folder in a published model's format, with random weights",
        epilog="Sizes that are not given are the published ones. Tokens are bytes. Equal arguments give equal files.",
    )
    make.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    make.add_argument("--geometry", required=True, choices=sorted(GEOMETRIES), help="the published model")
    for name, text in SIZES.items():
        make.add_argument(f"--{name}", type=int, metavar="N", help=text)
    make.add_argument("--dtype", choices=sorted(DTYPE_NAMES), default="bf16", help="of matrices (default bf16)")
    make.add_argument("--seed", type=int, default=0, metavar="S", help="default 0")
    make.add_argument(
        "--never-stop", action="store_true", help="greedy streams give bytes only, so that none ends by itself"
    )
    make.add_argument("--no-progress", action="store_true", help="no progress bar")
    make.add_argument("--json", action="store_true", help="what was made, machine-readable")
    make.set_defaults(run=run_make)


def run_make(arguments: argparse.Namespace) -> int:
    """Write the folder and say what is in it."""
    sizes = GeometrySizes(**{name: getattr(arguments, name) for name in SIZES})
    dtype = DTYPE_NAMES[arguments.dtype]
    raw = sized_config(arguments.geometry, sizes, dtype)
    # Late, so that no other verb pays for torch.
    from forkpoint.model.random_folder import RandomFolder

    made = RandomFolder(raw, arguments.seed, dtype, arguments.never_stop)
    facts = _facts(arguments.geometry, made)
    made.require_room(arguments.folder)
    if not arguments.json:
        _say(facts)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=arguments.no_progress or not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("writing", total=made.weight_bytes)
        made.write(arguments.folder, lambda count: progress.update(task, advance=count))
    if arguments.json:
        print_json({"folder": str(arguments.folder), **facts})
    else:
        print(f"written to {arguments.folder}")
    return 0


def _facts(geometry: str, made: "RandomFolder") -> dict[str, object]:
    config = made.config
    return {
        "geometry": geometry,
        "layers": config.num_layers,
        "mla_layers": [layer + 1 for layer in config.mla_layers],
        "hidden": config.hidden_size,
        "heads": config.kda_heads,
        "experts": config.moe.experts if config.moe else 0,
        "ffn": config.moe.intermediate_size if config.moe else config.intermediate_size,
        "vocab": config.vocab_size,
        "seed": made.seed,
        "tensors": len(made.tensors),
        "files": len(made.shards),
        "bytes": made.weight_bytes,
    }


def _say(facts: dict[str, object]) -> None:
    mla = facts["mla_layers"]
    assert isinstance(mla, list) and isinstance(facts["bytes"], int)
    print(
        f"{facts['geometry']}: layers 1 to {facts['layers']}, of which {', '.join(map(str, mla))} are MLA and the rest "
        f"KDA; {facts['heads']} heads, hidden size {facts['hidden']}, {facts['experts']} experts of {facts['ffn']}, "
        f"{facts['vocab']} ids\n{facts['tensors']:,} tensors, {bytes_text(facts['bytes'])} in {facts['files']} file(s)"
    )
