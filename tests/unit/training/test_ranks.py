"""What the ranks of a run agree on and share, each played by an object of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.state import TrainingState
from econmt.data.batching.batch import BatchShape
from econmt.data.batching.batches import Batch, pad_batch
from econmt.engine.communicator import Communicator
from econmt.errors import InputError
from econmt.training import ranks as module
from econmt.training.interrupts import Interrupts
from econmt.training.ranks import Ranks, check_shared
from tests.conftest import PATIENCE
from tests.unit.parallel.test_exchanges import Room, Threads, on_ranks


class World(Communicator):
    """A rank whose exchanges are a group's of threads."""

    def __init__(self, group: Threads, rank: int, stages: int = 1) -> None:
        self.rank, self.size, self.stages, self._group = rank, group.size, stages, group
        self._room: Room = group._room

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, source).wait()

    def gather(self, value: Any, *, patient: bool = False) -> list[Any]:
        self._group._calls += 1
        with self._room.condition:
            self._room.brought.setdefault(self._group._calls, {})[self.rank] = value
            self._room.condition.notify_all()
            here = self._room.brought[self._group._calls]
            assert self._room.condition.wait_for(lambda: len(here) == self.size, 60.0)
            return [here[rank] for rank in range(self.size)]

    def all_reduce_max_later(self, *values: int) -> Callable[[], list[int]]:
        work = self._group.gather(torch.tensor(values))
        return lambda: work.wait().max(0).values.tolist()


def ranks_of(world: Communicator, **step: Any) -> Ranks:
    given: Any = SimpleNamespace(communicator=world, **step)
    return Ranks(given)


def test_a_signal_of_any_rank_stops_all_and_clocks_follow_the_latest() -> None:
    """Answers are those of the call before; the first call waits for its own."""
    clocks = [[0.0, 10.0, 20.0, 30.0], [4.0, 11.0, 26.0, 31.0]]  # as each rank measures between the calls
    signals = [[None] * 4, [None, None, signal.SIGTERM, None]]

    def job(rank: int, group: Threads) -> list[tuple[bool, float, float, Any]]:
        ranks, found, state = ranks_of(World(group, rank)), [], TrainingState()
        interrupts, before = Interrupts(), 0.0
        for clock, number in zip(clocks[rank], signals[rank], strict=True):
            state.seconds += clock - before
            before = clock
            interrupts.received = interrupts.received or number
            stops = ranks.should_stop(interrupts, state)
            found.append((stops, ranks.seconds, state.seconds, interrupts.received))
        return found

    first, second = on_ranks(2, job)
    # The clock of rank 0 goes ahead by the 4 seconds that rank 1 was ahead at the call before, and so on.
    told = [(False, 4.0), (False, 4.0), (False, 14.0), (True, 29.0)]
    for found, own in (first, [0.0, 14.0, 24.0, 39.0]), (second, [4.0, 11.0, 29.0, 34.0]):
        assert [each[:2] for each in found] == told
        assert [each[2] for each in found] == own
    assert [each[3] for each in first] == [None, None, None, signal.SIGTERM]
    assert second[3][3] == signal.SIGTERM


def test_alone_a_signal_stops_at_once() -> None:
    ranks, interrupts, state = ranks_of(Communicator()), Interrupts(), TrainingState(seconds=7.0)
    assert not ranks.should_stop(interrupts, state)
    interrupts.received = signal.SIGINT
    assert ranks.should_stop(interrupts, state)
    assert ranks.seconds == 7.0


def batch_of(rows: int) -> Batch:
    ids = np.arange(2 * rows).reshape(rows, 2) + 4
    return pad_batch(np.arange(rows), ids, np.full(rows, 2), ids, np.full(rows, 2), (4, 5))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("replicas", "rows", "largest", "expected"),
    [(1, 5, 9, 5), (2, 5, 9, 5), (2, 9, 5, 5), (3, 7, 9, 3), (3, 2, 1, 1), (4, 5, 12, 3)],
)
def test_every_replica_has_its_rows_and_all_have_one_shape(
    stages: int, replicas: int, rows: int, largest: int, expected: int
) -> None:
    """Padded to the largest batch of the shape; of another shape, to the fewest rows."""
    for shape, wanted in (((4, 5), expected), ((9, 9), -(-rows // replicas))):
        taken: list[int] = []
        for replica in range(replicas):
            for stage in range(stages):
                world = Communicator()
                world.rank, world.size, world.stages = replica * stages + stage, replicas * stages, stages
                ranks = ranks_of(world)
                rows_of = ranks.pad_to_largest([BatchShape(*shape, largest, 3)], lambda: None)
                part = ranks.share(batch_of(rows))
                assert len(part.indices) == wanted
                if replicas > 1 and shape == (4, 5):
                    assert rows_of(batch_of(rows)) == -(-largest // replicas)
                real = part.indices[part.indices >= 0].tolist()
                taken += real if stage == 0 else []
        assert taken == list(range(rows))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("rows", [3, 4, 5, 6])
def test_states_of_all_rows_are_gathered(rows: int, stages: int) -> None:
    """Each of three replicas has made those of its own rows; index 0 is no row's."""
    share = -(-rows // 3)

    def job(rank: int, group: Threads) -> Tensor:
        world, buffer = World(group, rank, stages), torch.zeros(2, 1, 1 + rows, 4)
        if rank % stages == 0:  # only a first stage's are sent on
            own = rank // stages
            buffer[:, :, 1 + own * share : 1 + (own + 1) * share] = own + 1.0
        return ranks_of(world, carried=lambda: {"state": buffer}).carried(rows)["state"]

    expected = [0.0, *(1.0 + row // share for row in range(rows))]
    for found in on_ranks(3 * stages, job):
        assert found[0, 0, :, 0].tolist() == expected
        assert torch.equal(found, torch.tensor(expected)[:, None].expand(2, 1, 1 + rows, 4))


def test_rank_zero_gets_the_optimizer_s_state_of_all() -> None:
    names = {
        "a": nn.Parameter(torch.zeros(2)),
        "b": nn.Parameter(torch.zeros(3)),
        "c": nn.Parameter(torch.zeros(1)),
    }

    def job(rank: int, group: Threads) -> dict[str, Tensor]:
        owned = {"a": 0, "b": 1, "c": 1}
        local = {
            f"{kind}/{name}": torch.full((size,), 10.0 * rank + size, dtype=dtype)
            for name, size in (("a", 2), ("b", 3), ("c", 1))
            if owned[name] == rank
            for kind, dtype in (("exp_avg", torch.float32), ("step", torch.float64))
        }
        ranks = ranks_of(World(group, rank), shares=object(), optimizer_tensors=lambda: local)
        return ranks.optimizer_tensors(names)

    whole, part = on_ranks(2, job)
    assert {name: (value.tolist(), value.dtype) for name, value in whole.items()} == {
        "exp_avg/a": ([2.0] * 2, torch.float32),
        "step/a": ([2.0] * 2, torch.float64),
        "exp_avg/b": ([13.0] * 3, torch.float32),
        "step/b": ([13.0] * 3, torch.float64),
        "exp_avg/c": ([11.0], torch.float32),
        "step/c": ([11.0], torch.float64),
    }
    assert sorted(part) == ["exp_avg/b", "exp_avg/c", "step/b", "step/c"]


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [([1.0, 1.5, 1.0], []), ([1.0, 1.51, 1.0], [1]), ([3.0, 1.0], [0]), ([2.0, 9.0, 2.0, 4.0], [1, 3])],
)
def test_slow_ranks_are_told_by_all(seconds: list[float], slow: list[int]) -> None:
    def job(rank: int, group: Threads) -> list[str]:
        notes: list[str] = []
        step: Any = SimpleNamespace(communicator=World(group, rank), seconds=seconds[rank])
        progress: Any = SimpleNamespace(note=notes.append)
        Ranks(step).report_slow(progress)
        assert step.seconds == 0.0
        return notes

    for notes in on_ranks(len(seconds), job):
        assert [note.split()[1] for note in notes] == list(map(str, slow))
    if slow == [1, 3]:
        assert "it takes 4.5 times the median 2.00 s" in notes[0]


def test_every_rank_must_see_the_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for other, within in ((tmp_path, PATIENCE), (tmp_path / "elsewhere", 0.0)):
        monkeypatch.setattr(module, "SEEN_WITHIN", within)
        other.mkdir(exist_ok=True)
        if not within:  # what rank 0 makes is there at once
            (tmp_path / f".ranks.{'0' * 16}.tmp").touch()
        errors: list[str] = []

        def job(rank: int, group: Threads, other: Any = other, errors: list[str] = errors) -> None:
            world = World(group, rank)
            monkeypatch.setattr(module.secrets, "token_hex", lambda _: "0" * 16)
            world.on_rank_zero = lambda function: function()  # type: ignore[method-assign]
            with pytest.raises(InputError) if other != tmp_path else nullcontext() as caught:
                check_shared(ModelFolder(tmp_path if rank != 1 else other), world)
            errors += [] if caught is None else [str(caught.value)]

        on_ranks(3, job)
        assert len(errors) == (0 if other == tmp_path else 3)
        assert all("rank 1 (" in error and "rank 2 (" not in error for error in errors)
        assert not [*tmp_path.glob(".ranks*")]
