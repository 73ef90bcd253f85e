"""Settings: file, then environment, then flags; a bad value names the setting and where it came from."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from forkpoint.config import ServerConfig, load_config
from forkpoint.errors import ConfigError


def test_defaults_are_a_node_on_this_machine_only() -> None:
    config = load_config(environment={})
    assert (config.host, config.port, config.durability, config.threads) == ("127.0.0.1", 50061, "local_fsync", 2)
    assert config.catalog_url == f"sqlite://{Path('forkpoint-data').absolute()}/catalog.sqlite"
    assert config.blobs_url == f"file://{Path('forkpoint-data').absolute()}/blobs"


def test_flags_win_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "forkpoint.toml"
    file.write_text('[server]\nslots = 3\npages = 30\nnode = "from-file"\ncheckpoint_on_turn_end = true\n')
    environment = {"FORKPOINT_PAGES": "40", "FORKPOINT_NODE": "from-env", "FORKPOINT_ADDRESS": "not ours"}
    config = load_config({"node": "from-flag", "slots": None}, environment, file)
    assert (config.slots, config.pages, config.node, config.checkpoint_on_turn_end) == (3, 40, "from-flag", True)
    through = load_config(environment={"FORKPOINT_CONFIG": str(file)})
    assert (through.slots, through.node) == (3, "from-file")


def test_every_setting_can_be_given_in_every_place(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "model": str(tmp_path),
        "data": str(tmp_path),
        "catalog": "memory://",
        "blobs": "memory://",
        "namespace": "n",
        "host": "::1",
        "port": 0,
        "advertise": "h:1",
        "port_file": str(tmp_path / "p"),
        "node": "b",
        "compress": False,
        "slots": 2,
        "pages": 3,
        "threads": 1,
        "device": "cuda:1",
        "cuda_graphs": False,
        "checkpoint_every": 0,
        "checkpoint_on_turn_end": True,
        "keep_last": 5,
        "ladder_step": 32,
        "gc_interval_seconds": 0,
        "gc_grace_seconds": 1,
        "gc_budget_bytes": 1_000_000_000_000,
        "prefill_chunk": 7,
        "stream_age_seconds": 60,
        "stall_seconds": 5,
        "durability": "memory",
        "sabotage": "conv-tail",
    }
    assert set(values) == {field.name for field in fields(ServerConfig)}
    file = tmp_path / "forkpoint.toml"
    lines = [
        f"{k} = {str(v).lower() if isinstance(v, bool | int) else chr(34) + v + chr(34)}" for k, v in values.items()
    ]
    file.write_text("[server]\n" + "\n".join(lines))
    from_file = load_config(environment={}, file=file)
    from_environment = load_config(environment={f"FORKPOINT_{k.upper()}": str(v) for k, v in values.items()})
    from_flags = load_config({k: str(v) for k, v in values.items()}, environment={})
    assert from_file == from_environment == from_flags
    assert from_file.model == tmp_path and from_file.port == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "70000"),
        ("port", "http"),
        ("slots", "0"),
        ("pages", "-1"),
        ("threads", "0"),
        ("checkpoint_every", "17"),
        ("stream_age_seconds", "-1"),
        ("stall_seconds", "-1"),
        ("keep_last", "1"),
        ("keep_last", "1001"),
        ("ladder_step", "17"),
        ("ladder_step", "-16"),
        ("gc_interval_seconds", "-1"),
        ("gc_grace_seconds", "99999999"),
        ("gc_budget_bytes", "-1"),
        ("checkpoint_on_turn_end", "maybe"),
        ("durability", "paper"),
        ("device", "abacus"),
        ("node", "Not An Id"),
        ("namespace", ""),
        ("host", ""),
        ("model", "/nowhere/at/all"),
    ],
)
def test_a_bad_value_names_the_setting_and_its_source(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({name: value}, environment={})
    assert (error.value.key, error.value.source) == (name, f"flag --{name.replace('_', '-')}")
    with pytest.raises(ConfigError) as error:
        load_config(environment={f"FORKPOINT_{name.upper()}": value})
    assert error.value.source == f"environment variable FORKPOINT_{name.upper()}"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[server]\nslot = 3\n", "slot"),
        ('[server]\nslots = "many"\n', "slots"),
        ("[server]\nslots = 1.5\n", "slots"),
        ("[server]\nslots = true\n", "slots"),
        ("[server]\nnode = 5\n", "node"),
        ("server = 3\n", "server"),
        ("[server\n", "config"),
    ],
)
def test_a_wrong_file_names_the_setting_and_the_file(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "forkpoint.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(environment={}, file=file)
    assert (error.value.key, error.value.source) == (key, str(file))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(environment={}, file=tmp_path / "nowhere.toml")
