"""The benchmark of memory: its checkpointed decoder computes what the reference does, and it runs to its end."""

from __future__ import annotations

import importlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from econmt.config.recipe import load_recipe
from econmt.model import Implementations, TranslationModel, build_model
from econmt.tasks.translation import TranslationTask

REFERENCE = Implementations("reference", "reference", "reference")
SCOPES = ("attention", "step", "everything")


@pytest.fixture(autouse=True)
def not_deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def steps() -> ModuleType:
    return importlib.import_module("scripts.bench.memory_steps")


@pytest.fixture
def bench() -> ModuleType:
    return importlib.import_module("scripts.bench.memory")


def gradients(model: TranslationModel, case: object) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    model.zero_grad()
    task = TranslationTask(load_recipe("quickstart"), 60, 60)
    batch = case.batches[0]  # type: ignore[attr-defined]
    loss = task.loss(model, batch, REFERENCE, 0.1) / batch.target_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {name: value.grad.clone() for name, value in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("recipe", "change"), [("best", "model.dropout.layers=0.3"), ("iwslt", "model.dropout=0.2")]
)
def test_checkpointed_model_equals_the_reference(
    steps: ModuleType, scope: str, recipe: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "CHUNK_BYTES", 4 * 60 * 4)  # several chunks, the last one smaller
    case = steps.make_case(recipe, "text", True, torch.device("cpu"))
    model = (
        build_model(load_recipe(recipe, [*steps.FUSED.get(recipe, ()), *steps.QUICK, change]), 60, 60)
        .train()
        .double()
    )
    loss, wanted = gradients(model, case)
    checkpointed = steps.CheckpointedModel(model, scope)
    again, found = gradients(checkpointed, case)
    assert again == pytest.approx(loss, rel=1e-6)  # the loss is a float32
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9, msg=name)


def test_checkpointing_more_keeps_less(steps: ModuleType) -> None:
    case = steps.make_case("iwslt", "9x8", True, torch.device("cpu"))
    run = steps.Steps(case, torch.device("cpu"))
    kept = [
        run.ledger(variant, run.largest).stashed
        for variant in (steps.step_variants()[0], *steps.checkpoint_variants())
    ]
    rows, source, target, size = 3, 9, 8, 8
    assert kept[0] - kept[1] >= 4 * rows * source * target * size  # the tanh of query + key
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)


@pytest.mark.thorough
def test_quick_run_measures_everything(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "memory.json"
    assert bench.main(["--quick", "--device", "cpu", "--output", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = found["step"][0]["rows"]
    names = [row["name"] for row in rows]
    assert names[0] == "reference"
    assert {"+ output", "all, outputs", "checkpoint: attention", "checkpoint: everything"} <= set(names)
    assert len(found["step"][0]["note"]) > 0
    for row in rows:
        assert 0 < row["stash_bytes"] < row["peak_bytes"]
        assert row["quartiles"][0] <= row["milliseconds"] <= row["quartiles"][1]
        assert row["tokens_per_second"] == pytest.approx(1000 * 15 / row["milliseconds"])
    stash = {row["name"]: row["stash_bytes"] for row in rows if row["precision"] == "float32"}
    assert stash["reference"] > stash["+ decoder"] > stash["all, gates"] > stash["all, outputs"]
    first, second = found["output"][0]["rows"]
    assert first["peak_bytes"] > second["peak_bytes"] > 0


def test_an_interruption_leaves_what_was_measured(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = bench.Steps.values

    def values(self: object, variant: object) -> object:
        found = real(self, variant)
        if variant.name == "+ output":  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(bench.Steps, "values", values)
    file = tmp_path / "memory.json"
    how = ["--quick", "--device", "cpu", "--only", "step", "--output", str(file)]
    assert bench.main(how) == 130
    found = json.loads(file.read_text())
    rows = {row["name"]: row for row in found["step"][0]["rows"] if row["precision"] == "float32"}
    assert rows["reference"]["turns"] == rows["+ output"]["turns"] == 1
    assert rows["+ output"]["stash_bytes"] > 0
    assert rows["all, outputs"]["failure"] == bench.NO_TIME
    said = capsys.readouterr().out
    assert "not measured: no time left" in said
    assert "interrupted" in said


def test_a_wrong_variant_ends_the_run(
    bench: ModuleType,
    steps: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = steps.CheckpointedModel.loss
    monkeypatch.setattr(
        steps.CheckpointedModel, "loss", lambda *arguments, **named: 1.001 * real(*arguments, **named)
    )
    assert bench.main(["--quick", "--device", "cpu", "--only", "checkpoint"]) == 1
    assert "checkpoint: attention: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--only", "step", "--variants", "fast"], ["--only", "step", "--lengths", "10x"], ["--recipes", "none"]],
)
def test_bad_input_is_refused(
    bench: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--quick", "--device", "cpu", "--limit", "100", *arguments]) == 2
    assert "memory: " in capsys.readouterr().err
