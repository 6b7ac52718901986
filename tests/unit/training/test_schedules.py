from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

from econmt.config.recipe import ScheduleSection as Config
from econmt.training.decisions import Schedule


def schedule(**keys: object) -> Schedule:
    return Schedule(Config.model_validate(keys), 0.4, 16)


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


def test_plateau_follows_the_table_and_others_never_reduce() -> None:
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
    constant = schedule(name="constant", reduce_num_not_improved=1)
    assert not any(constant.checkpoint(False) for _ in range(5))
    assert not constant.goes_back
    assert schedule(name="plateau-reduce").goes_back
    plateau = schedule(name="plateau-reduce", reduce_num_not_improved=1)
    plateau.checkpoint(False)
    found = schedule(name="inverse-sqrt", warmup=1)
    found.load_state_dict(plateau.state_dict())
    assert found.learning_rate(4) == pytest.approx(0.4 / math.sqrt(4))


ENDS = {"warmup": 4, "decay_updates": 20, "min_learning_rate": 0.1}
ROOT = math.sqrt(2)


def test_rates_are_those_of_the_formulas() -> None:
    for keys, rates in (
        ({"name": "constant"}, {1: 0.4, 2: 0.4, 10**6: 0.4}),
        ({"name": "constant", "warmup": 4}, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.4, 6: 0.4}),
        ({"name": "inverse-sqrt", "warmup": 100}, {50: 0.2, 100: 0.4, 400: 0.2, 900: 0.4 / 3}),
        (
            {"name": "noam", "warmup": 100},
            {n: 0.4 * 16**-0.5 * min(n**-0.5, n * 100**-1.5) for n in (1, 50, 99, 100, 101, 400, 5000)},
        ),
        (
            {"name": "cosine", **ENDS},
            {2: 0.2, 4: 0.4, 8: 0.1 + 0.3 * (2 + ROOT) / 4, 12: 0.25, 20: 0.1, 1000: 0.1},
        ),
        ({"name": "linear", **ENDS}, {2: 0.2, 4: 0.4, 8: 0.325, 12: 0.25, 20: 0.1, 1000: 0.1}),
        ({"name": "cosine", "decay_updates": 20}, {20: 0.0}),
        ({"name": "linear", "warmup": 4, "decay_updates": 5}, {4: 0.4, 5: 0.0}),
    ):
        found = {update: schedule(**keys).learning_rate(update) for update in rates}
        assert found == pytest.approx(rates, rel=1e-12, abs=1e-16)


def test_schedules_that_lack_something_are_refused() -> None:
    for message, keys in {
        "cosine needs decay_updates of more than warmup": {"name": "cosine"},
        r"more than warmup \(5\)": {"name": "linear", "warmup": 5, "decay_updates": 5},
    }.items():
        with pytest.raises(ValidationError, match=message):
            schedule(**keys)
