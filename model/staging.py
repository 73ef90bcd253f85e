"""StateStaging: a session's checkpoint parts as bytes, out of its slot and pages and back.

KDA parts are many and small, and some are strided: the chosen kernels put all of them side by side in one buffer on the
device, which then goes to the host in one copy, or came from there. A full page is contiguous where it lies.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.staging.pieces import Piece, Table, build_table
from forkpoint.model.kernels import Kernels
from forkpoint.model.state import TORCH_DTYPES, StateTensors
from forkpoint.parts import PartSpec

PAGES_AT_ONCE: Final = 32
"""Pages on their way to the host together: K3's take 57 MB of its memory."""


class StateStaging:
    """Not thread-safe, like the tensors. Host memory is pinned where the device is a GPU."""

    def __init__(self, tensors: StateTensors, kernels: Kernels) -> None:
        self._tensors, self._kernels = tensors, kernels
        self._on_gpu: Final = tensors.device.type == "cuda"

    def read(
        self, position: int, slot: int, page_table: Sequence[int], skip: Collection[str] = ()
    ) -> Iterator[tuple[PartSpec, Tensor]]:
        """Every part of the checkpoint at grid position `position` with its bytes, uint8 [nbytes], in layer order, but
        for the pages whose names are in `skip`.

        The bytes lie in host memory that may be used again for the parts after them. Raises ValueError off the grid,
        and for a page table that is too short.
        """
        specs = self._tensors.layout.parts(position)
        if self._table is not None:
            buffer = torch.empty(self._table.nbytes, dtype=torch.uint8, device=self._tensors.device)
            self._kernels.gather(self._table, buffer, [slot])
            host = self.host_buffer().copy_(buffer) if self._on_gpu else buffer
            for spec, offset in zip(specs, self._table.offsets, strict=False):
                yield spec, host[offset : offset + spec.nbytes]
        pages = [spec for spec in specs[len(self._offsets) :] if spec.name not in skip]
        yield from self._read_pages(pages, page_table)

    def host_buffer(self) -> Tensor:
        """Host memory for the KDA parts of one session, of unspecified content."""
        return self._host(0 if self._table is None else self._table.nbytes)

    def write(
        self, spec: PartSpec, data: bytes | bytearray | memoryview, buffer: Tensor, page_table: Sequence[int]
    ) -> None:
        """Puts one part's bytes where `finish` expects them: in `buffer`, or in the page itself.

        Raises ValueError for a part that this model doesn't have, or another number of bytes.
        """
        if len(data) != spec.nbytes:
            raise ValueError(f"part {spec.name} has {spec.nbytes} bytes, got {len(data)}")
        if spec.name in self._offsets:
            offset = self._offsets[spec.name]
            buffer.numpy().data[offset : offset + spec.nbytes] = memoryview(data).cast("B")
        else:
            # A copy, because torch wants memory that may be written.
            values = torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[spec.dtype])
            self._page_view(spec, page_table).copy_(values.view(spec.shape))

    def finish(self, buffer: Tensor, slot: int) -> None:
        """Puts the KDA parts of a buffer in place, once all of them are in it."""
        if self._table is not None:
            self._kernels.scatter(self._table, buffer.to(self._tensors.device), [slot])

    @cached_property
    def _table(self) -> Table | None:
        """Of the KDA parts; None without KDA layers."""
        parts = [self._pieces(spec) for spec in self._tensors.layout.parts(0)]
        return build_table(parts) if parts else None

    @cached_property
    def _offsets(self) -> dict[str, int]:
        names = (spec.name for spec in self._tensors.layout.parts(0))
        return {} if self._table is None else dict(zip(names, self._table.offsets, strict=True))

    def _pieces(self, spec: PartSpec) -> list[Piece]:
        """Where a KDA part lies in the pools: at slot 0, the other slots a step apart."""
        tensors, place = self._tensors, self._tensors.layout.kda_part_places[spec.name]
        pool = tensors.S if place.kind == "state" else tensors.conv_grid
        step, rows = pool.stride(1) * pool.element_size(), pool[place.ordinal, 0]
        if place.kind == "state":
            return [Piece(rows[place.first_head : place.last_head], step)]
        channels = tensors.layout.conv_channel_ranges(place.first_head, place.last_head)
        return [Piece(rows[:, first:last], step) for first, last in channels]

    def _read_pages(self, specs: Sequence[PartSpec], page_table: Sequence[int]) -> Iterator[tuple[PartSpec, Tensor]]:
        size = self._tensors.layout.page_bytes()
        host = self._host(min(len(specs), PAGES_AT_ONCE) * size)
        for first in range(0, len(specs), PAGES_AT_ONCE):
            group = specs[first : first + PAGES_AT_ONCE]
            places = [host[index * size :][: spec.nbytes] for index, spec in enumerate(group)]
            for spec, place in zip(group, places, strict=True):
                target = place.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
                target.copy_(self._page_view(spec, page_table), non_blocking=True)
            if self._on_gpu:
                torch.cuda.current_stream(self._tensors.device).synchronize()
            yield from zip(group, places, strict=True)

    def _page_view(self, spec: PartSpec, page_table: Sequence[int]) -> Tensor:
        prefix, _, index = spec.name.rpartition(".")
        if prefix != "mla.page" or not index.isdigit():
            raise ValueError(f"this model has no part {spec.name!r}")
        if int(index) >= len(page_table):
            raise ValueError(f"part {spec.name} lies beyond the {len(page_table)} pages of the session")
        return self._tensors.pages[page_table[int(index)], :, : spec.shape[1]]

    def _host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._on_gpu)
