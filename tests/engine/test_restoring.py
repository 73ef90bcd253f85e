"""Restores that are incomplete, of another layout, or too large."""

import re
from dataclasses import replace
from typing import Any

import pytest

from forkpoint.errors import NodeCapacityError, StateIncompatibleError
from forkpoint.model.layout import StateLayout
from forkpoint.parts import PartSpec
from forkpoint.server.engine.base import Capture
from forkpoint.server.engine.batch import Work
from forkpoint.server.engine.runner import TorchEngine
from tests.support.engines import GREEDY, MakeEngine, consume, restore


@pytest.fixture
def captured(make_engine: MakeEngine) -> Capture:
    """The checkpoint at 96 of a session with 100 tokens."""
    engine = make_engine()
    sequence = engine.create()
    consume(engine, sequence, list(range(90)) + [1] * 10)
    return engine.capture(sequence)


def test_the_parts_of_a_capture_are_the_layouts_in_layer_order(engine: TorchEngine, captured: Capture) -> None:
    assert tuple(spec for spec, _ in captured.parts) == engine.parts(96)
    assert all(len(data) == spec.nbytes for spec, data in captured.parts)
    assert [spec.name for spec in engine.parts(16)][:4] == [
        "kda.000.state.0",
        "kda.000.conv.0",
        "kda.000.state.1",
        "kda.000.conv.1",
    ]
    assert engine.parts(96)[-1].shape[1] == 32
    with pytest.raises(ValueError, match="not on the grid"):
        engine.parts(17)


def test_missing_parts_are_named_and_the_sequence_can_still_be_completed(
    engine: TorchEngine, captured: Capture
) -> None:
    sequence = engine.begin_restore(96)
    for spec, data in captured.parts[2:]:
        engine.load_part(sequence, spec, data)
    with pytest.raises(StateIncompatibleError, match=r"kda\.000\.conv\.0, kda\.000\.state\.0"):
        engine.end_restore(sequence)
    for spec, data in captured.parts[:2]:
        engine.load_part(sequence, spec, data)
    engine.end_restore(sequence)
    assert engine.consumed(sequence) == 96


def test_each_missing_part_is_noticed(make_engine: MakeEngine, captured: Capture) -> None:
    engine = make_engine(slots=1)
    for left_out, _ in captured.parts:
        sequence = engine.begin_restore(96)
        for spec, data in captured.parts:
            if spec != left_out:
                engine.load_part(sequence, spec, data)
        with pytest.raises(StateIncompatibleError) as raised:
            engine.end_restore(sequence)
        assert raised.value.what == f"parts {left_out.name}"
        engine.free(sequence)
    assert engine.check() == []


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("kda.000.state.0", {"name": "kda.009.state.0"}, "no such part"),
        ("mla.page.000001", {"name": "mla.page.000002"}, "no such part"),
        ("kda.000.state.0", {"shape": (1, 16, 25)}, "SHAPE"),
        ("kda.000.state.0", {"dtype": "int32"}, "float32"),
        ("mla.page.000001", {"shape": (1, 64, 40)}, "SHAPE"),
    ],
)
def test_a_part_of_another_layout_is_refused(
    engine: TorchEngine, name: str, change: dict[str, Any], problem: str
) -> None:
    sequence = engine.begin_restore(96)
    ours = {spec.name: spec for spec in engine.parts(96)}[name]
    spec = replace(ours, **change)
    with pytest.raises(StateIncompatibleError, match=re.escape(problem.replace("SHAPE", str(list(ours.shape))))):
        engine.load_part(sequence, spec, bytes(spec.nbytes))
    engine.free(sequence)
    assert engine.check() == []


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_a_part_of_another_size_is_refused(engine: TorchEngine, captured: Capture, change: int) -> None:
    sequence = engine.begin_restore(96)
    for spec, data in captured.parts:
        with pytest.raises(StateIncompatibleError, match=f"{spec.nbytes} bytes"):
            engine.load_part(sequence, spec, (data + bytes(4))[: spec.nbytes + change])


def test_parts_may_be_loaded_again_before_the_end(engine: TorchEngine, captured: Capture) -> None:
    sequence = engine.begin_restore(96)
    for spec, _ in captured.parts:
        engine.load_part(sequence, spec, bytes(spec.nbytes))
    for spec, data in captured.parts:
        engine.load_part(sequence, spec, data)
    engine.end_restore(sequence)
    assert engine.capture(sequence) == captured


def test_a_sequence_being_restored_neither_runs_nor_forks_nor_is_captured(
    engine: TorchEngine, captured: Capture
) -> None:
    sequence = engine.begin_restore(96)
    assert not engine.can_sample(sequence)
    for call in (
        lambda: engine.step([Work(sequence, 96, (1,))]),
        lambda: engine.fork(sequence),
        lambda: engine.capture(sequence),
    ):
        with pytest.raises(ValueError, match="being restored"):
            call()
    for spec, data in captured.parts:
        engine.load_part(sequence, spec, data)
    engine.end_restore(sequence)
    with pytest.raises(ValueError, match="not being restored"):
        engine.load_part(sequence, *captured.parts[0])
    with pytest.raises(ValueError, match="not being restored"):
        engine.end_restore(sequence)


def test_a_restored_sequence_samples_only_after_it_consumed_a_token(engine: TorchEngine, captured: Capture) -> None:
    sequence = restore(engine, captured)
    assert not engine.can_sample(sequence)
    with pytest.raises(ValueError, match="no row"):
        engine.step([Work(sequence, 96, (), GREEDY)])
    assert engine.step([Work(sequence, 96, (1,), GREEDY)]) != [None]
    assert engine.can_sample(sequence)


def test_a_restore_without_room_takes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=1, pages=1)
    with pytest.raises(NodeCapacityError, match="pages"):
        engine.begin_restore(96)
    assert engine.capacity().slots_free == 1
    engine.create()
    with pytest.raises(NodeCapacityError, match="slots"):
        engine.begin_restore(16)
    assert engine.capacity().pages_free == 1 and engine.check() == []


def test_a_failed_restore_leaves_a_live_session_alone(engine: TorchEngine, captured: Capture) -> None:
    live = restore(engine, captured)
    failing = engine.begin_restore(96)
    with pytest.raises(StateIncompatibleError):
        engine.end_restore(failing)
    engine.free(failing)
    assert engine.capture(live) == captured


def test_an_unknown_sabotage_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="unknown sabotage 'other'"):
        make_engine(sabotage="other")


def test_a_restore_asks_for_the_layout_once_however_many_parts_it_has(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, asked = StateLayout.parts, list[int]()

    def counted(self: StateLayout, position: int) -> tuple[PartSpec, ...]:
        asked.append(position)
        return layout(self, position)

    specs = engine.parts(960)
    monkeypatch.setattr(StateLayout, "parts", counted)
    sequence = engine.begin_restore(960)
    for spec in specs:
        engine.load_part(sequence, spec, bytes(spec.nbytes))
    engine.end_restore(sequence)
    assert len(specs) > 15 and asked.count(960) == 1
