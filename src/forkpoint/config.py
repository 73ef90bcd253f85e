"""Settings of a serving process: defaults, then a TOML file, then the environment, then flags. Read once.

In a file they stand in the table [server]; in the environment a setting `slots` is FORKPOINT_SLOTS. A wrong value is a
ConfigError that names the setting and where it came from.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from forkpoint.errors import ConfigError, InvalidFieldError
from forkpoint.ids import check_id
from forkpoint.limits import (
    CHECKPOINT_EVERY_TOKENS_DEFAULT,
    CHECKPOINTS_KEPT_DEFAULT,
    CHECKPOINTS_KEPT_MAX,
    CHECKPOINTS_KEPT_MIN,
    GC_GRACE_SECONDS_DEFAULT,
    GC_INTERVAL_SECONDS_DEFAULT,
    GC_SECONDS_MAX,
    LADDER_STEP_TOKENS_DEFAULT,
    LADDER_STEP_TOKENS_MAX,
    PREFILL_CHUNK_TOKENS_DEFAULT,
    STALL_SECONDS_DEFAULT,
    STREAM_AGE_SECONDS_DEFAULT,
    TILE_TOKENS,
)

ENVIRONMENT_PREFIX: Final = "FORKPOINT_"
TABLE: Final = "server"
DURABILITIES: Final = ("memory", "local_fsync", "replicated")
DEVICES: Final = ("cpu", "cuda")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What `forkpoint serve` needs to know. Sizes in tokens, pages of 64 tokens."""

    model: Path | None = None
    """Folder of the model; None: the tiny model that comes with Forkpoint."""
    data: Path = Path("forkpoint-data")
    """Folder for what has no place of its own below: catalog, blobs, locks."""
    catalog: str = ""
    """URL of the catalog; "": SQLite in the data folder."""
    blobs: str = ""
    """URL of the blob store, or of several tiers with white space between; "": files in the data folder."""
    compress: bool = True
    """Store floats by byte planes where that pays; else as they are, for disks faster than the processors left over."""
    namespace: str = "default"
    host: str = "127.0.0.1"
    port: int = 50061
    """0: any free one."""
    advertise: str = ""
    """`host:port` that other nodes' clients are sent to; "": host and port as bound."""
    port_file: Path | None = None
    """Written with `host:port` once the node serves."""
    node: str = "node"
    """Name of this node, unique among those that share a store."""
    slots: int = 16
    pages: int = 2048
    threads: int = 2
    """CPU threads of a product: part of the numerics id."""
    device: str = "cpu"
    cuda_graphs: bool = True
    """On a GPU steps whose shapes come again are recorded and replayed: as exact, and faster."""
    checkpoint_every: int = CHECKPOINT_EVERY_TOKENS_DEFAULT
    """For sessions that say nothing; a multiple of 16; 0: never by count."""
    checkpoint_on_turn_end: bool = False
    keep_last: int = CHECKPOINTS_KEPT_DEFAULT
    """Newest checkpoints of a session that stay, for sessions that say nothing."""
    ladder_step: int = LADDER_STEP_TOKENS_DEFAULT
    """Of older checkpoints one every so many tokens stays, and ever fewer further back; a multiple of 16; 0: none."""
    gc_interval_seconds: int = GC_INTERVAL_SECONDS_DEFAULT
    """How often garbage is collected; 0: only when `forkpoint gc` asks."""
    gc_grace_seconds: int = GC_GRACE_SECONDS_DEFAULT
    """How long a blob that no checkpoint names is left alone."""
    gc_budget_bytes: int = 0
    """What a tier of blobs may hold before checkpoints are dropped that no session needs; 0: any amount."""
    prefill_chunk: int = PREFILL_CHUNK_TOKENS_DEFAULT
    stream_age_seconds: int = STREAM_AGE_SECONDS_DEFAULT
    """A stream of tokens is ended with its position after about so long, and its client opens it again; 0: never."""
    stall_seconds: int = STALL_SECONDS_DEFAULT
    """A node whose work stands still for so long gives its sessions up; 0: never."""
    durability: str = "local_fsync"
    """The least that the store must reach; the server does not start below it."""
    sabotage: str | None = None
    """For the demo's self-test: damage what is restored, so that comparing states must fail."""

    @property
    def catalog_url(self) -> str:
        """The catalog to open."""
        return self.catalog or f"sqlite://{self.data.absolute() / 'catalog.sqlite'}"

    @property
    def blobs_url(self) -> str:
        """The blob store to open."""
        return self.blobs or f"file://{self.data.absolute() / 'blobs'}"


_NAMES: Final = tuple(field.name for field in fields(ServerConfig))


def load_config(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> ServerConfig:
    """Settings from all places. `flags` holds those that were given (None: not given), by setting's name.

    `file` None: FORKPOINT_CONFIG when that is set, else no file. Raises ConfigError.
    """
    environment = os.environ if environment is None else environment
    if file is None and environment.get(f"{ENVIRONMENT_PREFIX}CONFIG"):
        file = Path(environment[f"{ENVIRONMENT_PREFIX}CONFIG"])
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(name: str, value: Any, source: str) -> None:
        values[name] = _convert(name, value, source)
        sources[name] = source

    if file is not None:
        for name, value in _read(file).items():
            if name not in _NAMES:
                raise ConfigError(name, str(file), f"no such setting; there are {', '.join(_NAMES)}")
            take(name, value, str(file))
    for name in _NAMES:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment:
            take(name, environment[variable], f"environment variable {variable}")
    for name, value in (flags or {}).items():
        if value is not None:
            take(name, value, f"flag --{name.replace('_', '-')}")
    config = ServerConfig(**values)
    _check(config, sources)
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            document = tomllib.load(stream)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("config", str(file), f"can't be read: {error}") from error
    table = document.get(TABLE, {})
    if not isinstance(table, dict):
        raise ConfigError(TABLE, str(file), "is no table")
    return table


def _convert(name: str, value: Any, source: str) -> Any:
    """`value` as the setting's type. Text from the environment and flags is parsed; a file's types must fit."""
    kind = get_type_hints(ServerConfig)[name]
    kinds = tuple(part for part in get_args(kind) if part is not type(None)) or (kind,)
    if kinds == (Path,) and isinstance(value, str | Path):
        return Path(value)
    if kinds == (bool,):
        if isinstance(value, bool):
            return value
        word = str(value).lower()
        if word in _TRUE | _FALSE:
            return word in _TRUE
        raise ConfigError(name, source, f"{value!r} is neither true nor false")
    if kinds == (int,) and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        try:
            return int(str(value))
        except ValueError as error:
            raise ConfigError(name, source, f"{value!r} is no whole number") from error
    if kinds == (str,) and isinstance(value, str):
        return value
    raise ConfigError(name, source, f"{value!r} is no {' or '.join(part.__name__ for part in kinds)}")


def _check(config: ServerConfig, sources: Mapping[str, str]) -> None:
    def refuse(name: str, problem: str) -> ConfigError:
        return ConfigError(name, sources.get(name, "default"), problem)

    for name, least, most in (
        ("port", 0, 65_535),
        ("slots", 1, 1 << 20),
        ("pages", 1, 1 << 30),
        ("threads", 1, 1024),
        ("prefill_chunk", 1, 1 << 20),
        ("checkpoint_every", 0, 1 << 30),
        ("stream_age_seconds", 0, 1 << 30),
        ("stall_seconds", 0, 1 << 30),
        ("keep_last", CHECKPOINTS_KEPT_MIN, CHECKPOINTS_KEPT_MAX),
        ("ladder_step", 0, LADDER_STEP_TOKENS_MAX),
        ("gc_interval_seconds", 0, GC_SECONDS_MAX),
        ("gc_grace_seconds", 0, GC_SECONDS_MAX),
        ("gc_budget_bytes", 0, 1 << 60),
    ):
        value = getattr(config, name)
        if not least <= value <= most:
            raise refuse(name, f"{value} is not in {least} … {most}")
    for name in ("checkpoint_every", "ladder_step"):
        if getattr(config, name) % TILE_TOKENS:
            raise refuse(name, f"{getattr(config, name)} is no multiple of {TILE_TOKENS}")
    for name, known in (("durability", DURABILITIES), ("device", DEVICES)):
        if getattr(config, name).partition(":")[0] not in known:
            raise refuse(name, f"{getattr(config, name)!r} is none of {', '.join(known)}")
    for name in ("node", "namespace"):
        try:
            check_id(getattr(config, name), name)
        except InvalidFieldError as error:
            raise refuse(name, error.problem) from error
    if not config.host:
        raise refuse("host", "is empty")
    if config.model is not None and not config.model.is_dir():
        raise refuse("model", f"{config.model} is no folder")
