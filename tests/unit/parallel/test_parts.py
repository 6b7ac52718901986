"""Who a process is, which rank has what, and what a person is told when one is gone."""

from __future__ import annotations

import pytest

from econmt.errors import InputError
from econmt.parallel.processes import _Watch
from econmt.parallel.rank_environment import RankEnvironment, rank_environment
from econmt.parallel.reduction import rows_are_fewer
from econmt.parallel.sharding import largest_share, shares

RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_the_environment_says_who_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_environment() is None
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert rank_environment() == RankEnvironment(1, 2, 0, 1, 0)


def test_an_environment_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, message in (
        ("RANK", "one", "RANK is 'one', not a number"),
        ("WORLD_SIZE", "9" * 5000, "WORLD_SIZE is '9{40}', not a number"),
        ("RANK", "2", "RANK 2 and LOCAL_RANK 0 must be less than WORLD_SIZE 2"),
        ("MASTER_PORT", None, "MASTER_PORT is missing"),
    ):
        with monkeypatch.context() as patch:
            for key, given in {**RANK, name: value}.items():
                if given is not None:
                    patch.setenv(key, given)
            with pytest.raises(InputError, match=message):
                rank_environment()


def test_shares_are_as_even_as_whole_parameters_can_be() -> None:
    assert shares([5, 1, 4, 3, 3], 2) == [0, 1, 1, 1, 0]
    assert largest_share([5, 1, 4, 3], 2) == (1, 7 / 13)
    assert shares([], 3) == []
    assert shares([7], 3) == [0]


def test_rows_travel_where_they_are_fewer_than_a_table_twice() -> None:
    assert rows_are_fewer([3, 9], (10, 4))
    assert not rows_are_fewer([3, 10], (10, 4))


def test_the_line_names_who_is_gone_or_late() -> None:
    watch = _Watch(0, 3, _Store(), _Store(), 120)
    first = "rank 1 (node1, process 7)"
    late = "did not reach a collective operation after update 2 within 120 s"
    for seen, line in (
        ({0: [5, 2]}, f"{first} and rank 2 (never connected) do not answer, after update 2"),
        ({0: [5, 2], 2: [5, 3]}, f"{first} does not answer, after update 3"),
        ({0: [5, 2], 1: [4, 2], 2: [5, 2]}, f"{first} {late}"),
    ):
        assert watch._line(seen, "?").startswith(f"{line}; all ranks stop")
    alike = {rank: [5, 2] for rank in range(3)}
    assert "failed after update 2 (cable cut)" in watch._line(alike, "cable cut")


class _Store:
    """Two hosts, of which one never came."""

    def set(self, *_: str) -> None:
        return

    def check(self, keys: list[str]) -> bool:
        return keys != ["host/2"]

    def get(self, key: str) -> bytes:
        return f"{key.replace('host/', 'node')}, process 7".encode()
