"""Which implementations a run uses: measured or by the rule, kept when it goes on, and pinned by its recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from econmt.config.recipe import load_recipe
from econmt.data.batching.batch import BatchShape
from econmt.engine.precision import NAMED, Precision
from econmt.errors import InputError
from econmt.model import Implementations, build_model
from econmt.tasks.translation import TranslationTask
from econmt.training import choice
from econmt.training.choice import (
    Shape,
    as_saved,
    choose_implementations,
    expected_updates,
    frequent_shape,
    is_worth_measuring,
    measure,
    refuse_missing,
    saved_choice,
)
from econmt_ops.dispatch import session
from econmt_ops.dispatch.measurements import Measurement, MeasurementRecord
from econmt_ops.dispatch.rule import captured, rules_only
from econmt_ops.dispatch.traits import implementations_of
from tests.unit.training.tiny import Run

CPU = torch.device("cpu")
AUTO = Implementations()
RULE = Implementations.everywhere("recompute", "gates")


def measurement(op: str, calls: int = 1, first: float = 0.0, **milliseconds: float) -> Measurement:
    level = "" if op == "linear_cross_entropy" else "/gates"
    records = {
        name + (level if name != "reference" else ""): MeasurementRecord(time, time, time, 0, first)
        for name, time in milliseconds.items()
    }
    return Measurement(op, f"{op} {milliseconds}", "recompute" + level, records, calls)


def test_nothing_measured_is_the_rule_and_all_calls_of_a_kind_count() -> None:
    for named in ({}, {"output": "reference"}, {"stash": "cells"}):
        assert choose_implementations(Implementations(**named), []) == RULE._replace(**named)
    # What is named keeps what it keeps by itself.
    for encoder, stash in (("recompute", "auto"), ("reference", "gates")):
        assert choose_implementations(Implementations(encoder=encoder), []).stash == stash
    on_gpu = Implementations("reference", "reference", "recompute", "recompute", "gates")
    assert choose_implementations(AUTO, [], device="cuda") == on_gpu
    both = measurement("bidirectional_lstm", reference=1.0, recompute=2.5)
    stack = measurement("lstm", reference=2.0, recompute=1.5)
    assert choose_implementations(AUTO, [both, stack]).encoder == "reference"
    assert choose_implementations(AUTO, [both, stack._replace(calls=3)]).encoder == "recompute"
    with_one_more = measurement("lstm", reference=2.0, recompute=1.5, compiled=0.1)
    assert choose_implementations(AUTO, [both, with_one_more], updates=1e9).encoder == "reference"


def test_each_kind_of_op_for_itself() -> None:
    found = [
        measurement("attentional_lstm", reference=1.0, recompute=2.0),
        measurement("linear_cross_entropy", reference=2.0, recompute=1.0),
        measurement("linear", reference=2.0, recompute=1.0),
    ]
    chosen = Implementations("recompute", "reference", "recompute", "recompute", "gates")
    assert choose_implementations(AUTO, found) == chosen
    assert choose_implementations(Implementations(decoder="recompute"), found).decoder == "recompute"


@pytest.mark.parametrize(("milliseconds", "expected"), [(0.9, "recompute"), (0.8, "reference")])
def test_the_reference_must_be_worth_its_memory(milliseconds: float, expected: str) -> None:
    found = [measurement("lstm", reference=milliseconds, recompute=1.0)]
    assert choose_implementations(AUTO, found).encoder == expected


@pytest.mark.parametrize(("updates", "expected"), [(99.0, "recompute"), (101.0, "compiled")])
def test_compiling_must_pay(updates: float, expected: str) -> None:
    """A function is compiled once, however often it is called."""
    found = [measurement("attentional_lstm", 2, first=20.0, reference=150.0, recompute=100.0, compiled=50.0)]
    assert (
        choose_implementations(AUTO, found, updates=updates, positions=2 * choice.POSITIONS).decoder
        == expected
    )


def test_a_run_is_as_long_as_its_first_limit() -> None:
    def updates(*changes: str) -> float:
        changes = ("training.early_stopping.max_num_checkpoint_not_improved=null", *changes)
        return expected_updates(load_recipe("multi30k", changes).training, 100)

    none = "training.max_updates=null"
    assert updates("training.max_updates=30") == 30
    assert updates(none, "training.max_epochs=2", "training.update_interval=4") == 50
    assert updates(none, "training.max_seconds=5") == 0
    patience = "training.early_stopping.max_num_checkpoint_not_improved=3"
    assert updates(patience, "training.max_updates=9999", "training.checkpoint_interval=10") == 30


def test_the_shape_of_most_rows_is_measured_but_not_of_small_models() -> None:
    """Not that of most batches, of the largest ones, or of the last."""
    shapes = [BatchShape(*sizes) for sizes in ((4, 5, 10, 9), (6, 7, 40, 3), (8, 9, 50, 2), (9, 9, 30, 3))]
    assert frequent_shape(SimpleNamespace(shapes=lambda: shapes)) == Shape(40, 6, 7)  # type: ignore[arg-type]
    small = build_model(load_recipe("quickstart"), 97, 97)
    with torch.device("meta"):
        large = build_model(load_recipe("multi30k"), 8000, 8000)
    assert not is_worth_measuring(small, Shape(64, 500, 5))  # of long sentences a few positions are measured
    assert is_worth_measuring(large, Shape(64, 16, 16))


def test_all_seconds_of_measuring_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    task, seconds = TranslationTask(load_recipe("quickstart"), 19, 23), iter([1.5, 0.5, 0.0, 9.0])
    monkeypatch.setattr(choice, "_LEAST_OPERATIONS", 0.0)
    session = lambda *_: SimpleNamespace(measurements={}, seconds=next(seconds))  # noqa: E731
    monkeypatch.setattr(choice, "measure", session)
    _, why = choice.settle(task, task.build_model, Shape(4, 5, 5), CPU, Precision(), passes=9)
    assert (why, next(seconds)) == ("measured in 2.0 s", 9.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Tiny models are measured too, each op is called once, and the reference is always the quickest."""
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "_LEAST_OPERATIONS", 0.0)
    session.forget()
    real = session.alternate

    def quick(functions: Any, *_: Any, **__: Any) -> Any:
        found = real(functions, math.inf, clock=count().__next__, least=1, most=1, drop=False)
        seconds = {name: 1.0 if name.startswith("reference") else 2.0 for name in found}
        return {name: timing._replace(samples=(seconds[name],)) for name, timing in found.items()}

    monkeypatch.setattr(session, "alternate", quick)
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    yield
    session.forget()


@pytest.mark.parametrize("input_feeding", [True, False])
@pytest.mark.usefixtures("measured")
def test_every_op_of_a_model_is_measured_with_gradients(input_feeding: bool) -> None:
    changes = [f"model.decoder.input_feeding={str(input_feeding).lower()}", "model.encoder.layers=2"]
    small = ["model.embedding=6", "model.encoder.size=8", "model.decoder.size=8", "model.attention.size=5"]
    task = TranslationTask(load_recipe("iwslt", [*changes, *small]), 19, 23)
    model = task.build_model().train()
    before = torch.get_rng_state()
    session = measure(task, model, Shape(3, 9, 2), Precision())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    keys = list(session.measurements)
    assert all(key.endswith("backward") for key in keys)
    attention = "attentional_lstm" if input_feeding else "additive_attention"
    ops = {"bidirectional_lstm", "lstm", "linear_cross_entropy", attention}
    assert {key.partition(" ")[0] for key in keys} == ops
    assert any("B=3" in key and "T=6" in key for key in keys)


@pytest.mark.usefixtures("measured")
def test_a_run_is_measured_at_its_start_and_keeps_the_choice(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Run(text, tmp_path / "one", ("training.max_updates=2",)).trained()
    chosen = RULE._replace(encoder="reference", decoder="reference", output="reference")
    said = "ops: encoder reference, decoder reference, attention recompute, output reference, stash gates (measured in"
    assert said in one.said()
    assert said in one.folder.log.read_text()
    # It goes on as it began, although the rule says otherwise now.
    monkeypatch.setattr(choice, "measure", None)
    later = Run(text, tmp_path / "one", ("training.max_updates=4",))
    trainer = later.trainer()
    assert trainer.step.implementations == chosen
    assert trainer.state.choices == as_saved(chosen, CPU)
    # A recipe pins what it names.
    pinned = Run(text, tmp_path / "one", ("training.max_updates=4", "ops.encoder=recompute"))
    assert pinned.trainer().step.implementations == chosen._replace(encoder="recompute")


def test_tiny_runs_follow_the_rule(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "measure", None)
    tiny = Run(text, tmp_path / "tiny", ("training.max_updates=2",)).trained()
    assert "stash gates (default; the model is too small to measure)" in tiny.said()
    ops = ("ops={encoder: reference, decoder: reference, output: reference}",)
    named = Run(text, tmp_path / "named", ops)
    assert named.trainer().step.implementations[:2] == ("reference",) * 2


def test_choices_for_another_device_machine_or_graph() -> None:
    recipe, saved = load_recipe("quickstart", ["ops.output=reference"]), as_saved(RULE, CPU)
    assert saved_choice(recipe, saved, CPU) == RULE._replace(output="reference")
    for other, device in ((saved, torch.device("cuda")), ({}, CPU), ({"device": "cpu"}, CPU)):
        assert saved_choice(recipe, other, device) is None
    refuse_missing(AUTO, "cpu")
    refuse_missing(Implementations.everywhere("recompute"), "cpu")
    message = r"ops.output=triton: cannot run .* cpu; use one of auto, reference, recompute"
    with pytest.raises(InputError, match=message):
        refuse_missing(Implementations(output="triton"), "cpu")
    with rules_only("cuda"):
        eager = choose_implementations(AUTO, [], device="cuda", precision=NAMED["bfloat16"])
        with captured():
            found = choose_implementations(AUTO, [], device="cuda", precision=NAMED["bfloat16"])
    assert {found.traits(key).recomputes for key in ("encoder", "decoder", "output")} == {True}
    level = implementations_of("attentional_lstm")[found.decoder].traits.model_stash
    assert found.stash == eager.stash == level
