"""A plan that is made from measured times is one that the model can be divided by."""

from __future__ import annotations

import json

import pytest

from econmt.engine.precision import Precision
from econmt.model import Implementations
from econmt.parallel.pipeline.costs import plan_pipeline
from econmt.parallel.pipeline.model_parts import divided
from econmt.parallel.pipeline.partition import Link, PipelinePlan
from econmt.tasks.protocol import Shape, Task
from tests.unit.parallel.pipeline_checks import PLAIN, language_model_task, translation_task

FREE = Link(0.0, 0.0)
"""What a transfer takes."""


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (language_model_task("model.weight_tying=softmax"), "e: layer 0"),
        (translation_task(*PLAIN, "model.encoder.bidirectional=bottom"), "decoder: layer 0"),
        (translation_task("model.encoder={layers: 3, size: 8, bidirectional: none, rank: 2}"), "feeding"),
    ],
)
def test_every_parameter_has_a_home(task: Task, told: str) -> None:
    model, how = task.build_model().train(), Implementations.everywhere("reference")
    plan = plan_pipeline(model, 2, Shape(4, 16, 16), FREE, Precision(), how)
    again = PipelinePlan(*json.loads(json.dumps(plan)))
    assert again == plan
    assert told in plan.note
    homes = divided(model, plan).homes
    assert homes.keys() == dict(model.named_parameters()).keys()
    assert set(homes.values()) <= {-1, 0, 1}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_that_cost_what_they_do_here_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([16.0, 2.0, 17.0])
    monkeypatch.setattr("econmt.parallel.pipeline.costs.shortest_seconds", lambda *_: next(times))
    model = language_model_task("model.embedding=6").build_model()
    how = Implementations.everywhere("reference")
    plan = plan_pipeline(model, 4, Shape(4, 1, 16), FREE, Precision(), how)
    assert plan.homes == [[0, 0, 1, 1, 2, 2, 3, 3]]
    assert plan.chunks == [16]
    # 8 layers of 16 steps and 1 s for their weights; 16 chunks over four stages of two, and those of the first.
    assert f"{8 * 17 / (8 + 15 * 2 + 2):.2f} times as fast as on one rank" in plan.note
