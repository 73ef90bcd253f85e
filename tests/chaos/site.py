"""The machines of one run: network, store, nodes."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from forkpoint.client.client import Client
from tests.chaos.fleet import Seat, Zygote, start_all
from tests.chaos.network import Loopback, Network, network
from tests.chaos.redis_pair import SERVERS, RedisPair
from tests.chaos.verdict import Settings

PATIENCE_SECONDS: Final = 300.0
"""A stream that hears nothing for so long gives up: no evil lasts longer."""


class Site:
    """One run's machines. Used as `async with`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self._stack = AsyncExitStack()
        self.names = [f"n{number}" for number in range(1, settings.nodes + 1)]
        self.network: Network
        self.redis: RedisPair | None = None
        self.zygote = Zygote()
        self.seats: list[Seat] = []

    async def __aenter__(self) -> "Site":
        async with AsyncExitStack() as stack:
            self.network = network(self.names, SERVERS) if self.settings.apart else Loopback(self.names)
            stack.callback(self.network.close)
            stack.push_async_callback(self.zygote.close)
            await self.zygote.start()
            if self.settings.catalog == "redis":
                self.redis = RedisPair(self.network, self.folder)
                stack.callback(self.redis.close)
                await self.redis.start()
            self.seats = [self._seat(name) for name in self.names]
            await start_all(self.seats)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def catalog_url(self) -> str:
        """What the nodes share."""
        return f"sqlite://{self.folder / 'catalog.sqlite'}" if self.redis is None else self.redis.url

    @property
    def blobs_url(self) -> str:
        """Where their blobs are."""
        return f"file://{self.folder / 'blobs'}"

    def seat(self, name: str) -> Seat:
        """The node of that name, given as `nodes/{n}` too."""
        return self.seats[self.names.index(name.removeprefix("nodes/"))]

    async def quiet(self) -> Seat:
        """A server beside all that."""
        seat = Seat(
            "quiet",
            Loopback(["quiet"]),
            self.zygote,
            self.folder / "quiet",
            {**self._sizes(), "catalog": "memory://", "checkpoint_every": 0, "slots": 64},
            self.settings.engine,
        )
        await seat.start()
        return seat

    def client(self, first: int) -> Client:
        """One that knows all addresses, and begins with that of a node."""
        addresses = [seat.address for seat in self.seats]
        return Client(addresses[first:] + addresses[:first], patience_s=PATIENCE_SECONDS)

    def _seat(self, name: str) -> Seat:
        stores: dict[str, str | int] = {"catalog": self.catalog_url, "blobs": self.blobs_url}
        stores |= {"checkpoint_every": 64, "gc_interval_seconds": 20, "gc_grace_seconds": 30}
        return Seat(
            name,
            self.network,
            self.zygote,
            self.folder / name,
            {**self._sizes(), **stores},
            self.settings.engine,
            self.settings.step_pause_ms,
            far=self.settings.far and name == self.names[-1],
            gated=self.settings.gated,
        )

    def _sizes(self) -> dict[str, str | int]:
        return {"slots": self.settings.slots, "pages": 4096, "threads": 1}
