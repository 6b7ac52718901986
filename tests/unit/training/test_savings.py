"""A memory budget may store moments in 8 bits and parameters in bfloat16, if it may and has to, cheapest first."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from econmt.budget.planner import Planner
from econmt.config.recipe import Recipe, load_recipe
from econmt.engine.communicator import Communicator
from econmt.engine.precision import NAMED
from econmt.errors import InputError
from econmt.training import savings as module
from econmt.training.savings import choose_savings, with_savings
from tests.unit.training.test_hooks import MakeRun
from tests.unit.training.tiny import snapshot

BUDGET = ("training.memory_budget=1GiB", "training.memory_savings=lossy")
LAST = "params.00008.safetensors"


def needs(recipe: Recipe) -> int:
    """Bytes of a step, one for each that a value of the parameters takes."""
    training = recipe.training
    parameter = 2 if training.param_dtype == "bfloat16" else 4
    return parameter + (2 if training.optimizer.name.endswith("8bit") else 8)


def chosen(budget: int, *keys: str, precision: str = "bfloat16", processes: int = 1) -> list[str]:
    def plan_of(recipe: Recipe) -> Any:
        needed = needs(recipe)
        if needed > 2 * budget:
            raise InputError(f"needs {needed}")
        return [SimpleNamespace(batches=1, parts=1 if needed <= budget else 1 + needed - budget)]

    recipe = load_recipe("quickstart", [*BUDGET, *keys])
    found, plan = choose_savings(recipe, NAMED[precision], processes, plan_of)
    assert plan == plan_of(with_savings(recipe, found))
    return list(found)


def test_savings_are_chosen_in_the_order_of_their_cost() -> None:
    assert chosen(12) == []
    assert chosen(11) == ["moments"]
    assert chosen(6) == ["moments"]
    assert chosen(5) == ["moments", "parameters"]
    assert chosen(3) == ["moments", "parameters"]  # in parts, the fewest
    with pytest.raises(InputError, match="needs 4"):
        chosen(1)


def test_savings_that_a_recipe_rules_out_are_not_chosen() -> None:
    assert chosen(6, "training.memory_savings=exact") == []
    assert chosen(5, precision="float32") == ["moments"]
    assert chosen(5, processes=2) == ["moments"]
    assert chosen(5, "training.averaging.start=at-once") == ["moments"]
    assert chosen(10, "training.optimizer.name=sgd") == ["parameters"]
    assert chosen(4, "training.optimizer.name=adamw8bit") == ["parameters"]


class TwoRanks(Communicator):
    """Rank 0 of two, which notes its results, or with these the other one."""

    size = 2

    def __init__(self, results: list[str], rank: int) -> None:
        self.results, self.rank = results, rank

    def on_rank_zero(self, function: Callable[[], Any]) -> Any:
        if self.rank == 0:
            self.results.append(json.dumps(function()))
            return json.loads(self.results[-1])
        return json.loads(self.results.pop(0))


def test_all_ranks_choose_alike_where_a_plan_is_impossible(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, results, calls, allot = make_run(*BUDGET), list[str](), list[int](), Planner.allot

    def in_8_bits(planner: Planner) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise InputError("too little")
        return allot(planner)

    monkeypatch.setattr(Planner, "allot", in_8_bits)
    arguments = run.recipe, run.prepared(), torch.device("cpu"), NAMED["float32"]
    for rank in range(2):
        found, plan = module.plan_with_savings(*arguments, TwoRanks(results, rank))
        assert found == ["moments"]
        assert plan is not None
    assert results == []


def test_optimizers_keep_their_kind() -> None:
    recipe = load_recipe("quickstart", ["training.optimizer={name: adamw, weight_decay: 0.25}"])
    changed = with_savings(recipe, ["moments"]).training
    assert (changed.optimizer.name, changed.optimizer.weight_decay) == ("adamw8bit", 0.25)
    assert changed.param_dtype == "float32"
    assert recipe.training.optimizer.name == "adamw"


@pytest.mark.slow
def test_a_resumed_run_keeps_its_savings(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "plan_with_savings", lambda *_: (["moments", "parameters"], None))
    keys = (*BUDGET, "training.precision=bfloat16")
    whole = make_run(*keys, name="whole")
    whole.train()
    assert "moments in 8 bits and parameters in bfloat16" in whole.said()
    make_run(*keys, "training.max_updates=3", name="parts").train()
    monkeypatch.setattr(module, "plan_with_savings", lambda *_: pytest.fail("planned again"))
    parts = make_run(*keys, name="parts")
    parts.train()
    assert snapshot(whole.folder)[LAST] == snapshot(parts.folder)[LAST]
    trainer = make_run(*keys, name="parts").trainer()
    assert trainer.state.savings == ["moments", "parameters"]
    assert trainer.recipe.training.optimizer.name == "adam8bit"
    assert trainer.step.optimizer.names[0] == "adam8bit"
