from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

from econmt.config.recipe import ScheduleSection as Config
from econmt.training.decisions import Schedule


def schedule(**keys: object) -> Schedule:
    return Schedule(Config.model_validate(keys), 0.4, 16)


def test_constant() -> None:
    assert [schedule(name="constant").learning_rate(update) for update in (1, 2, 10**6)] == [0.4] * 3


def test_warm_up_is_linear_from_zero() -> None:
    rates = [schedule(name="constant", warmup=4).learning_rate(update) for update in range(1, 7)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_inverse_square_root_falls_after_the_warm_up() -> None:
    found = schedule(name="inverse-sqrt", warmup=100)
    assert found.learning_rate(50) == pytest.approx(0.2)
    assert found.learning_rate(100) == pytest.approx(0.4)
    assert found.learning_rate(400) == pytest.approx(0.2)
    assert found.learning_rate(900) == pytest.approx(0.4 / 3)


# checkpoint, improved?, reduced?, factor after it, checkpoints without improvement after it; patience 2, factor 0.7
PLATEAU = [
    (1, True, False, 1.0, 0),
    (2, False, False, 1.0, 1),
    (3, True, False, 1.0, 0),
    (4, False, False, 1.0, 1),
    (5, False, True, 0.7, 0),
    (6, False, False, 0.7, 1),
    (7, False, True, 0.49, 0),
    (8, True, False, 0.49, 0),
    (9, False, False, 0.49, 1),
]


def test_plateau_follows_the_table_also_through_a_saved_state() -> None:
    keys = {"name": "plateau-reduce", "reduce_factor": 0.7, "reduce_num_not_improved": 2, "warmup": 3}
    whole, resumed = schedule(**keys), schedule(**keys)
    for checkpoint, improved, reduced, factor, count in PLATEAU:
        fresh = schedule(**keys)
        fresh.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
        resumed = fresh
        assert whole.checkpoint(improved) is reduced, checkpoint
        assert resumed.checkpoint(improved) is reduced, checkpoint
        assert whole.factor == pytest.approx(factor), checkpoint
        assert whole.num_not_improved == count, checkpoint
        assert resumed.state_dict() == whole.state_dict()
        assert whole.learning_rate(100) == pytest.approx(0.4 * factor)
        assert whole.learning_rate(1) == pytest.approx(0.4 * factor / 3)


def test_only_a_plateau_schedule_reduces_and_goes_back() -> None:
    constant = schedule(name="constant", reduce_num_not_improved=1)
    assert not any(constant.checkpoint(False) for _ in range(5))
    assert not constant.goes_back
    assert schedule(name="plateau-reduce").goes_back


def test_the_state_of_another_schedule_is_left_aside() -> None:
    plateau = schedule(name="plateau-reduce", reduce_num_not_improved=1)
    plateau.checkpoint(False)
    found = schedule(name="inverse-sqrt", warmup=1)
    found.load_state_dict(plateau.state_dict())
    assert found.learning_rate(4) == pytest.approx(0.4 / math.sqrt(4))


def test_noam_is_the_formula_of_the_paper() -> None:
    found = schedule(name="noam", warmup=100)
    for update in (1, 50, 99, 100, 101, 400, 5000):
        expected = 0.4 * 16**-0.5 * min(update**-0.5, update * 100**-1.5)
        assert found.learning_rate(update) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", [0.2, 0.4, 0.1 + 0.3 * (2 + math.sqrt(2)) / 4, 0.25, 0.1, 0.1]),
        ("linear", [0.2, 0.4, 0.325, 0.25, 0.1, 0.1]),
    ],
)
def test_cosine_and_linear_end_at_the_lowest_rate(name: str, expected: list[float]) -> None:
    found = schedule(name=name, warmup=4, decay_updates=20, min_learning_rate=0.1)
    assert [found.learning_rate(update) for update in (2, 4, 8, 12, 20, 1000)] == pytest.approx(expected)
    assert schedule(name=name, decay_updates=20).learning_rate(20) == pytest.approx(0.0, abs=1e-16)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "cosine"}, "cosine needs decay_updates of more than warmup"),
        ({"name": "linear", "warmup": 5, "decay_updates": 5}, r"more than warmup \(5\)"),
    ],
)
def test_schedules_that_lack_something(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        schedule(**keys)
