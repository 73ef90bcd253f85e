"""`forkpoint model inspect`: what a model is made of, what it takes, and what is wrong with its folder."""

import argparse
import re
from typing import Any, Final

from forkpoint.cli.output import bytes_text, print_fields, print_json, print_table
from forkpoint.cli.plan import config_of
from forkpoint.errors import ConfigError
from forkpoint.model.config import ModelConfig
from forkpoint.model.device_fit import DeviceFit
from forkpoint.model.geometries import GEOMETRIES
from forkpoint.model.plan import MemoryPlan, make_plan
from forkpoint.model.published import is_packed
from forkpoint.model.weight_sizes import WeightSizes, weight_sizes

TOKENS_DEFAULT: Final = 32_768
UNITS: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `inspect`."""
    parser = actions.add_parser(
        "inspect",
        help="what a model is made of, what it takes on a GPU, and what is wrong with its folder",
        epilog="Reads config.json and the headers of the files, no weights. Exits with 1 when the folder can't be "
        "served, or when the sessions do not fit the memory that is given.",
    )
    parser.add_argument("model", metavar="MODEL", help=f"a folder, or {' or '.join(sorted(GEOMETRIES))}")
    parser.add_argument("--device-memory", metavar="SIZE", help="what the device has, such as 141GB or 80GiB")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS_DEFAULT, metavar="N", help=f"of a session (default {TOKENS_DEFAULT})"
    )
    parser.add_argument("--sessions", type=int, default=1, metavar="N", help="that share nothing (default 1)")
    parser.add_argument("--json", action="store_true", help="every figure, machine-readable")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 1 when there is a problem in it."""
    config = config_of(arguments.model, "MODEL")
    memory = None if arguments.device_memory is None else parse_bytes(arguments.device_memory, "--device-memory")
    plan = make_plan(config, arguments.tokens, sessions=arguments.sessions)
    packed, problems, notes = is_packed(config), list[str](), list[str]()
    if arguments.model not in GEOMETRIES:
        # Late: to look into files takes torch.
        from forkpoint.model.folder_check import check_folder

        found = check_folder(arguments.model, config)
        packed, problems, notes = found.packed, found.problems, found.notes
    sizes = weight_sizes(config, packed)
    fit = None if memory is None else DeviceFit(memory, sizes.device_bytes, plan.device_session, plan.sessions)
    if arguments.json:
        print_json(_document(config, packed, sizes, plan, fit) | {"problems": problems, "notes": notes})
    else:
        print_fields(_geometry(config, packed) | _counts(sizes))
        print()
        _print_weights(sizes)
        _print_sessions(plan)
        for line in _fit_lines(fit) if fit is not None else ():
            print(line)
        for line in (*(f"note: {note}" for note in notes), *(f"problem: {problem}" for problem in problems)):
            print(line)
    return 1 if problems or (fit is not None and fit.short_by) else 0


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of `141GB`, `80GiB` or a plain number. Raises ConfigError naming `flag`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS or float(match[1]) <= 0:
        raise ConfigError(flag, "command line", f"{text!r} is no size such as 141GB, 80GiB or 85899345920")
    return int(float(match[1]) * UNITS[match[2]])


def _geometry(config: ModelConfig, packed: bool) -> dict[str, object]:
    """What the model is, by name."""
    moe, bound = config.moe, config.gate_lower_bound
    ranks = f"latents {config.kv_lora_rank} + {config.qk_rope_head_dim}"
    if config.q_lora_rank is not None:
        ranks += f", queries {config.q_lora_rank}"
    facts: dict[str, object] = {
        "model": config.source,
        "layers": f"{len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA: "
        + ", ".join(str(layer + 1) for layer in config.mla_layers),
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "context limit": config.context_limit,
        "KDA": f"{config.kda_heads} heads, keys {config.kda_key_dim}, values {config.kda_value_dim}",
        "KDA decay": "softplus, unbounded" if bound is None else f"sigmoid, bounded by {bound:g}",
        "KDA output gate": "full rank" if config.full_rank_gate else f"rank {config.kda_key_dim}",
        "MLA": f"{config.mla_heads} heads of {config.qk_nope_head_dim} + {config.qk_rope_head_dim}, {ranks}",
        "MLA output gate": config.mla_output_gate,
        "activation": config.activation.name,
        "dense feed-forward": config.intermediate_size,
    }
    if moe is not None:
        layers = sum(moe.has(layer) for layer in range(config.num_layers))
        facts["experts"] = (
            f"{moe.experts} of {moe.intermediate_size} in {layers} layers, {moe.per_token} a token, "
            f"{moe.shared_experts} shared, {'MXFP4' if packed else 'as stored'}"
        )
        facts["router"] = (
            f"scaled by {moe.scaling_factor:g}, weights {'with' if moe.biased_weights else 'without'} bias"
        )
        if moe.latent_size is not None:
            facts["expert input"] = moe.latent_size
    block = config.attn_res_block_size
    facts["residuals"] = "plain" if block is None else f"attention over blocks of {block} layers"
    return facts


def _counts(sizes: WeightSizes) -> dict[str, object]:
    every, active, bare = (
        f"{n / 1e9:,.2f} B" for n in (sizes.parameters, sizes.active, sizes.active_without_embedding)
    )
    return {
        "tensors": sizes.tensors,
        "parameters": every,
        "active a token": f"{active}, {bare} without embedding",
    }


def _count(parameters: int) -> str:
    """49122681728 -> '49.12 B', a billion being 1000 million."""
    return f"{parameters / 1e9:,.2f} B" if parameters >= 10**9 else f"{parameters / 1e6:,.2f} M"


def _print_weights(sizes: WeightSizes) -> None:
    rows = [
        (
            group.kind,
            group.tensors,
            group.parameters,
            " ".join(group.device_bytes),
            group.nbytes,
            bytes_text(group.nbytes),
        )
        for group in sizes.groups
    ]
    dtypes = " ".join(sizes.device_bytes_by_dtype)
    total = sizes.device_bytes
    rows.append(("all", sizes.tensors, sizes.parameters, dtypes, total, bytes_text(total)))
    print_table(["", "tensors", "parameters", "kept as", "bytes", ""], rows, "Weights on a GPU")
    print()


def _print_sessions(plan: MemoryPlan) -> None:
    pages = plan.pages * plan.page_bytes
    rows = [
        ("slot, whatever its length", plan.slot.total),
        (f"latents, {plan.pages:,} pages of {plan.page_bytes:,} B", pages),
        ("slot and pages", plan.device_session),
        (f"{plan.sessions:,} sessions", plan.device_total),
        ("one checkpoint at its end, in the store", plan.checkpoint.total),
    ]
    shown = [(name, count, bytes_text(count)) for name, count in rows]
    print_table(["", "bytes", ""], shown, f"One session of {plan.tokens:,} tokens; more from `forkpoint plan`")
    print()


def _fit_lines(fit: DeviceFit) -> list[str]:
    """Whether it fits, in sentences."""
    device = f"{bytes_text(fit.device)} of device memory"
    if fit.weights_short_by:
        return [f"The weights do not fit {device}: {bytes_text(fit.weights_short_by)} are missing for them alone."]
    room = f"{fit.sessions_that_fit:,} such sessions fit beside the weights, less what a step needs for its rows."
    if fit.short_by:
        return [f"{fit.sessions:,} sessions do not fit {device}: {bytes_text(fit.short_by)} are missing.", room]
    return [
        f"Weights and {fit.sessions:,} sessions fit {device}: {bytes_text(fit.device - fit.needed)} are left.",
        room,
    ]


def _document(
    config: ModelConfig, packed: bool, sizes: WeightSizes, plan: MemoryPlan, fit: DeviceFit | None
) -> dict[str, Any]:
    groups = [
        {
            "kind": group.kind,
            "tensors": group.tensors,
            "parameters": group.parameters,
            "active": group.active,
            "device_bytes": dict(group.device_bytes),
        }
        for group in sizes.groups
    ]
    document: dict[str, Any] = {
        "geometry": _geometry(config, packed),
        "weights": {
            "tensors": sizes.tensors,
            "parameters": sizes.parameters,
            "active": sizes.active,
            "active_without_embedding": sizes.active_without_embedding,
            "device_bytes": sizes.device_bytes,
            "device_bytes_by_dtype": sizes.device_bytes_by_dtype,
            "groups": groups,
        },
        "plan": plan.as_dict(),
    }
    if fit is not None:
        document["fit"] = {
            "device_bytes": fit.device,
            "needed": fit.needed,
            "weights_short_by": fit.weights_short_by,
            "short_by": fit.short_by,
            "sessions_that_fit": fit.sessions_that_fit,
        }
    return document
