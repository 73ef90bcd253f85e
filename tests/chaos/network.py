"""Where the machines of a run are: network namespaces behind one bridge, which may be cut from each other; or, without
the right to make them, the loopback interface, which can't be cut."""

import os
import subprocess
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Final, Protocol

from tests.support.redis_servers import free_port

CLIENTS: Final = "clients"
"""The driver's own machine."""
STORE: Final = "store"
"""The address of whichever Redis is the primary."""
PORT: Final = 50061
NOBODY: Final = "02:00:00:00:00:01"
"""A hardware address that no machine has: frames for it are lost without a word."""
SUBNET: Final = "198.18"
"""For tests of networks (RFC 2544)."""


_NUMBERS: Final = count()


class Network(Protocol):
    """Machines by name."""

    can_cut: bool
    """Whether there can be partitions, and an address that moves."""

    def address(self, machine: str) -> str:
        """host:port of a node's service."""
        ...

    def host(self, machine: str) -> str:
        """Its IP address."""
        ...

    def netns(self, machine: str) -> str:
        """The namespace that its processes live in; "": the driver's."""
        ...

    def cut(self, machine: str, other: str, both: bool) -> None:
        """Lose what `machine` sends to `other`; `both`: and the answers' way as well."""
        ...

    def join(self, machine: str, other: str) -> None:
        """Lose nothing between the two any more."""
        ...

    def move_store(self, machine: str) -> None:
        """From now on the store's address leads to this machine."""
        ...

    def close(self) -> None:
        """Remove all of it."""
        ...


class Loopback:
    """All on one machine, each with a port of its own."""

    can_cut = False

    def __init__(self, nodes: Iterable[str]) -> None:
        self._ports = {node: free_port() for node in nodes}

    def address(self, machine: str) -> str:
        return f"127.0.0.1:{self._ports[machine]}"

    def host(self, machine: str) -> str:
        return "127.0.0.1"

    def netns(self, machine: str) -> str:
        return ""

    def cut(self, machine: str, other: str, both: bool) -> None:
        raise OSError("the loopback interface can't be cut")

    def join(self, machine: str, other: str) -> None:
        return

    def move_store(self, machine: str) -> None:
        return

    def close(self) -> None:
        return


class Namespaces:
    """A namespace a machine. A way is cut by a wrong hardware address in the sender's table: connections stay as they
    are, and nothing arrives, as behind a broken switch."""

    can_cut = True

    def __init__(self, machines: Sequence[str]) -> None:
        """Raises OSError without the right, or without `ip`."""
        number = next(_NUMBERS)
        self._tag = f"{os.getpid() % 100_000}n{number}"
        self._net = f"{SUBNET}.{(os.getpid() + 83 * number) % 250 + 1}"
        self._bridge = f"fpb{self._tag}"
        self._numbers = {machine: 11 + index for index, machine in enumerate(machines)}
        self._store_at: str | None = None
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        setup = [f"link add {self._bridge} type bridge", f"link set {self._bridge} up"]
        setup.append(f"addr add {self.host(CLIENTS)}/24 dev {self._bridge}")
        _ip(setup)
        for machine, number in self._numbers.items():
            space, outside = self.netns(machine), f"fpv{self._tag}x{number}"
            _ip(
                [
                    f"netns add {space}",
                    f"link add {outside} type veth peer name eth0 netns {space}",
                    f"link set {outside} master {self._bridge} up",
                ]
            )
            _ip([f"addr add {self.host(machine)}/24 dev eth0", "link set eth0 up", "link set lo up"], space)

    def address(self, machine: str) -> str:
        return f"{self.host(machine)}:{PORT}"

    def host(self, machine: str) -> str:
        number = {CLIENTS: 1, STORE: 2}.get(machine) or self._numbers[machine]
        return f"{self._net}.{number}"

    def netns(self, machine: str) -> str:
        return "" if machine == CLIENTS else f"fp{self._tag}-{machine}"

    def cut(self, machine: str, other: str, both: bool) -> None:
        self._lose(machine, other)
        if both and other != STORE:
            self._lose(other, machine)

    def join(self, machine: str, other: str) -> None:
        for sender, receiver in ((machine, other), (other, machine)):
            if sender != STORE:
                entry = f"neigh del {self.host(receiver)} dev {self._device(sender)}"
                _ip([entry], self.netns(sender), fails=True)

    def move_store(self, machine: str) -> None:
        address = self.host(STORE)
        if self._store_at is not None:
            _ip([f"addr del {address}/24 dev eth0"], self.netns(self._store_at))
        _ip([f"addr add {address}/24 dev eth0"], self.netns(machine))
        self._store_at = machine
        for other in (CLIENTS, *self._numbers):
            _ip([f"neigh flush to {address} dev {self._device(other)}"], self.netns(other))

    def close(self) -> None:
        for machine in self._numbers:
            _ip([f"netns del {self.netns(machine)}"], fails=True)
        _ip([f"link del {self._bridge}"], fails=True)

    def _lose(self, sender: str, receiver: str) -> None:
        entry = f"neigh replace {self.host(receiver)} lladdr {NOBODY} nud permanent dev {self._device(sender)}"
        _ip([entry], self.netns(sender))

    def _device(self, machine: str) -> str:
        return self._bridge if machine == CLIENTS else "eth0"


def network(nodes: Sequence[str], servers: Sequence[str]) -> Network:
    """Namespaces where they can be made, else the loopback interface."""
    if os.geteuid() == 0 and Path("/var/run").is_dir():
        try:
            return Namespaces([*nodes, *servers])
        except (OSError, subprocess.CalledProcessError):
            pass
    return Loopback(nodes)


def _ip(commands: Sequence[str], space: str = "", fails: bool = False) -> None:
    """Run `ip` commands at once, in a namespace when one is given. Raises CalledProcessError unless `fails`."""
    where = ("-n", space) if space else ()
    text = "".join(f"{command}\n" for command in commands)
    subprocess.run(
        ["ip", *where, "-batch", "-"], input=text, text=True, capture_output=True, check=not fails, timeout=30
    )
