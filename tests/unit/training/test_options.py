"""Options of training that other toolkits have, each in a run from its beginning to its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.training.tiny import Run, snapshot

MakeRun = Callable[..., Run]


@pytest.mark.parametrize("name", ["nadam", "adafactor"])
def test_a_run_goes_on_with_the_state_of_any_optimizer(make_run: MakeRun, name: str) -> None:
    key = f"training.optimizer.name={name}"
    whole, parts = make_run(key, name="whole"), make_run(key, name="parts")
    whole.train()
    make_run(key, "training.max_updates=4", name="parts").train()
    parts.train()
    assert snapshot(whole.folder) == snapshot(parts.folder)
