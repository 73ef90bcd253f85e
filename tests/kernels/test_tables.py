"""Tables of a step: all of them in one copy, at places of their own, and filled anew where they are."""

import pytest
import torch
from torch import Tensor

from forkpoint.kernels.tables import FixedTables, one_copy

CPU = torch.device("cpu")


def tables(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        ((7, 3), torch.int32),
        ((33,), torch.int64),
        ((0, 2), torch.int32),
        ((1,), torch.int64),
        ((0,), torch.int64),
    )
    return [
        torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(dtype) * (3 if dtype == torch.int64 else 1)
        for shape, dtype in shapes
    ]


def test_every_table_comes_out_as_it_was_at_an_aligned_place() -> None:
    given = tables(1)
    there = one_copy(given, CPU)
    for ours, table in zip(there, given, strict=True):
        assert ours.dtype == table.dtype and torch.equal(ours, table)
        assert ours.storage_offset() * ours.element_size() % 128 == 0
    assert len({table.untyped_storage().data_ptr() for table in there}) == 1


def test_fixed_tables_take_new_values_where_they_are() -> None:
    fixed = FixedTables(tables(1), CPU)
    views, places = list(fixed.parts), [part.data_ptr() for part in fixed.parts]
    fixed.fill(tables(2))
    for view, table in zip(views, tables(2), strict=True):
        assert torch.equal(view, table)
    assert [part.data_ptr() for part in fixed.parts] == places
    with pytest.raises(RuntimeError):
        fixed.fill([*tables(2), torch.zeros(99, dtype=torch.int32)])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        one_copy([torch.zeros(3)], CPU)
