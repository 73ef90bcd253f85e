"""The container files fit the repository and the command line. The images themselves are not built here."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from forkpoint.cli.main import build_parser
from forkpoint.config import load_config
from forkpoint.limits import SHUTDOWN_SECONDS
from forkpoint.statestore.redis.url import parse_redis_url

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
CLUSTER: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "cluster.yaml").read_text())


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continuation lines joined, comments dropped."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    pairs = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(pair[0], pair[1]) for pair in pairs]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def lines(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    return instructions(request.param)


def test_there_are_images_for_cpu_and_cuda() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


def test_every_copied_path_exists_and_reaches_the_build(lines: list[tuple[str, str]]) -> None:
    ignored = {line.rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line}
    copied = [a for name, a in lines if name == "COPY" and "--from" not in a]
    assert copied
    for arguments in copied:
        for path in arguments.split()[:-1]:
            assert (ROOT / path).exists(), path
            assert path.rstrip("/") not in ignored, f"{path} is copied and ignored"


def test_every_folder_of_the_package_is_copied(lines: list[tuple[str, str]]) -> None:
    copied = " ".join(a for name, a in lines if name == "COPY")
    for link in (ROOT / "src" / "forkpoint").iterdir():
        if link.is_symlink():
            assert f"{link.name}/ {link.name}/" in copied, link.name


def test_base_images_name_a_version(lines: list[tuple[str, str]]) -> None:
    for name, arguments in lines:
        if name == "FROM":
            assert re.search(r":[\w.-]*\d", arguments) and ":latest" not in arguments, arguments


def test_installs_leave_no_caches_and_use_the_tested_versions(lines: list[tuple[str, str]]) -> None:
    for name, arguments in lines:
        if name == "RUN" and "pip install" in arguments:
            assert "--no-cache-dir" in arguments and "-c constraints.txt" in arguments
        if name == "RUN" and "apt-get install" in arguments:
            assert "--no-install-recommends" in arguments and "rm -rf /var/lib/apt/lists/*" in arguments


def test_the_node_does_not_run_as_root_and_says_when_it_is_healthy(lines: list[tuple[str, str]]) -> None:
    final = lines[max(i for i, (name, _) in enumerate(lines) if name == "FROM") :]
    users = [arguments for name, arguments in final if name == "USER"]
    assert users and all(user not in {"root", "0", "0:0"} for user in users)
    assert [name for name, _ in final if name in {"HEALTHCHECK", "ENTRYPOINT", "CMD"}] == [
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    ]


def test_the_commands_in_the_image_are_commands_of_the_cli(lines: list[tuple[str, str]]) -> None:
    commands = {name: arguments for name, arguments in lines if name in {"HEALTHCHECK", "ENTRYPOINT", "CMD"}}
    assert json.loads(commands["ENTRYPOINT"]) == ["forkpoint"]
    assert build_parser().parse_args(json.loads(commands["CMD"])).verb == "serve"
    health = json.loads(commands["HEALTHCHECK"].split(" CMD ", 1)[1])
    assert build_parser().parse_args(health[1:]).verb == "doctor"


def test_compose_starts_a_node_and_a_redis_that_loses_no_acknowledged_write() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"node", "redis"}
    build = services["node"]["build"]
    context = (ROOT / "docker" / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]).is_file()
    redis = services["redis"]["command"]
    assert redis[redis.index("--appendfsync") + 1] == "always"
    health = services["node"]["healthcheck"]["test"]
    assert build_parser().parse_args(health[2:]).verb == "doctor"


def test_the_cluster_is_three_nodes_that_differ_in_name_address_and_volume() -> None:
    nodes = {name: service for name, service in CLUSTER["services"].items() if name != "redis"}
    assert set(nodes) == {"a", "b", "c"}
    for name, node in nodes.items():
        config = load_config(environment=node["environment"])
        assert (config.node, config.advertise) == (name, f"{name}:50061")
        assert config.catalog_url == nodes["a"]["environment"]["FORKPOINT_CATALOG"]
        assert parse_redis_url("catalog", config.catalog_url).hosts == (("redis", 6379),)
        assert node["volumes"] == [f"{name}:/var/lib/forkpoint"], "blobs of its own"
    assert len({port for node in nodes.values() for port in node["ports"]}) == 3
    for name in ("node", "redis"):
        single, ours = COMPOSE["services"][name], CLUSTER["services"]["a" if name == "node" else name]
        differing = {"environment", "volumes", "ports", "profiles", "hostname", "depends_on"}
        assert {k: v for k, v in single.items() if k not in differing} == {
            k: v for k, v in ours.items() if k not in differing
        }, "a node of a cluster is a node"


@pytest.mark.parametrize("compose", [COMPOSE, CLUSTER], ids=["compose", "cluster"])
def test_compose_mounts_declared_volumes_and_publishes_on_loopback_only(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for mount in service["volumes"]:
            assert mount.split(":")[0] in compose["volumes"], f"{name}: {mount}"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["cap_drop"] == ["ALL"], name


def test_compose_waits_longer_for_a_stop_than_the_node_takes() -> None:
    for service in (COMPOSE["services"]["node"], CLUSTER["services"]["a"]):
        assert int(service["stop_grace_period"].removesuffix("s")) > SHUTDOWN_SECONDS
