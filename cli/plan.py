"""`forkpoint plan`: memory arithmetic for a model, to the byte."""

import argparse
from pathlib import Path

from forkpoint.cli.output import bytes_text, print_json, print_table
from forkpoint.errors import ConfigError
from forkpoint.model.config import ModelConfig
from forkpoint.model.geometries import GEOMETRIES, geometry
from forkpoint.model.plan import DTYPE_NAMES, MemoryPlan, make_plan


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `plan`."""
    parser = verbs.add_parser("plan", help="what sessions take on the device and in the store")
    parser.add_argument("--model", required=True, help=f"{', '.join(sorted(GEOMETRIES))}, or a folder with config.json")
    parser.add_argument("--tokens", type=int, required=True, help="length of a session")
    parser.add_argument("--kda-dtype", choices=sorted(DTYPE_NAMES), default="fp32", help="dtype of S (default fp32)")
    parser.add_argument("--checkpoint-every", type=int, default=512, metavar="N", help="tokens (default 512)")
    parser.add_argument("--sessions", type=int, default=1, metavar="N", help="sessions that share nothing (default 1)")
    parser.add_argument("--json", action="store_true", help="every figure, machine-readable")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    plan = make_plan(
        config_of(arguments.model, "--model"),
        arguments.tokens,
        kda_dtype=arguments.kda_dtype,
        checkpoint_every=arguments.checkpoint_every,
        sessions=arguments.sessions,
    )
    if arguments.json:
        print_json(plan.as_dict())
    else:
        _print(plan)
    return 0


def config_of(model: str, flag: str) -> ModelConfig:
    """The config of a geometry or of a folder that `flag` names. Raises ConfigError."""
    if model in GEOMETRIES:
        return geometry(model)
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(
            flag, "command line", f"{model!r} is neither one of {sorted(GEOMETRIES)} nor a folder with config.json"
        )
    return ModelConfig.from_folder(model)


def _print(plan: MemoryPlan) -> None:
    print(
        f"{plan.model}: {plan.kda_layers} KDA layers (S in {plan.kda_dtype}), {plan.mla_layers} MLA layers "
        f"({plan.latent_bytes_per_token:,} B a token in {plan.activation_dtype})\n"
    )
    slot, one, every = plan.slot, plan.checkpoint, plan.all_checkpoints
    _section(
        "Slot of one session (its size does not depend on its length)",
        [
            ("S", slot.state),
            ("open tile", slot.open_tile),
            ("conv tail, live", slot.conv_live),
            ("conv tail, grid", slot.conv_grid),
            ("final-norm rows", slot.norm_rows),
            ("slot", slot.total),
        ],
    )
    _section(
        f"One session of {plan.tokens:,} tokens on the device",
        [
            (f"MLA latents, {plan.pages:,} pages of {plan.page_bytes:,} B", plan.pages * plan.page_bytes),
            ("slot and pages", plan.device_session),
            ("S and latents", plan.hybrid),
            ("if every layer were MLA", plan.all_mla),
        ],
        f"S and latents save {plan.hybrid_saving:.1%} of all-MLA",
    )
    _section(
        "One checkpoint at the session's end",
        [("S", one.state), ("conv tails", one.conv), ("latents", one.latents), ("checkpoint", one.total)],
    )
    _section(
        f"All {plan.checkpoints:,} checkpoints of one session, one every {plan.checkpoint_every:,} tokens",
        [
            ("S", every.state),
            ("conv tails", every.conv),
            ("latents, shared pages once", every.latents),
            ("checkpoints", every.total),
            ("S of all checkpoints with the live S and latents", plan.live_with_checkpoint_states),
        ],
    )
    _section(
        f"{plan.sessions:,} sessions that share nothing",
        [("device", plan.device_total), ("store, before compression", plan.store_total)],
    )


def _section(title: str, rows: list[tuple[str, int]], note: str = "") -> None:
    print_table(["", "bytes", ""], [(name, count, bytes_text(count)) for name, count in rows], title)
    print(note + "\n" if note else "")
