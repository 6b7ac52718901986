"""The benchmark of memory: its checkpointed decoder computes what the reference does, and it runs to its end."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest
import torch

from econmt.config.recipe import load_recipe
from econmt.data.batching.batches import Batch
from econmt.model import Implementations, TranslationModel
from econmt.tasks.translation import TranslationTask
from scripts.bench import memory_steps as steps
from scripts.bench.gpu.step import batches_of
from scripts.bench.memory_steps import CheckpointedModel, Steps
from tests.unit.cli.conftest import Call

REFERENCE = Implementations("reference", "reference", "reference")
SCOPES = ("attention", "step", "everything")


def gradients(
    model: TranslationModel, task: TranslationTask, batch: Batch
) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = task.loss(model, batch, REFERENCE, 0.1) / batch.target_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {name: value.grad.clone() for name, value in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("recipe", ["multi30k", "iwslt"])
def test_checkpointed_model_equals_the_reference(
    scope: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "CHUNK_BYTES", 4 * 60 * 4)  # several chunks, the last one smaller
    torch.manual_seed(1)
    task = TranslationTask(load_recipe(recipe, [*steps.QUICK, "model.dropout=0.2"]), 60, 60)
    model = task.build_model().train().double()
    [batch] = batches_of(task, [(3, 19, 14)], 0.3)
    loss, wanted = gradients(model, task, batch)
    again, found = gradients(CheckpointedModel(model, scope), task, batch)
    assert again == pytest.approx(loss, rel=1e-6)  # the loss is a float32
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9, msg=name)


def test_checkpointing_more_keeps_less() -> None:
    run = Steps(steps.make_case("iwslt", "9x8", steps.QUICK, torch.device("cpu")))
    kept = [
        float(run.memory_of(variant)["stash bytes"])
        for variant in (steps.step_variants()[0], *steps.checkpoint_variants())
    ]
    rows, source, target, size = 3, 9, 8, 8
    assert kept[0] - kept[1] >= 4 * rows * source * target * size  # the tanh of query + key
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.thorough
def test_quick_run_measures_everything(bench: Call, tmp_path: Path) -> None:
    file = tmp_path / "memory.csv"
    ended = bench("memory", "--quick", "--device", "cpu", "--seconds", "0.1", "--csv", file)
    assert ended.code == 0, ended.err
    first, second, *rows = rows_of(file)
    assert float(first["peak bytes"]) > float(second["peak bytes"]) > 0
    rows = [row for row in rows if row["case"].startswith("step")]
    names = [row["variant"] for row in rows]
    assert names[0] == "reference"
    assert {"+ output", "all, outputs", "checkpoint: attention", "checkpoint: everything"} <= set(names)
    for row in rows:
        assert 0 < float(row["stash bytes"]) < float(row["peak bytes"])
        assert float(row["lowest decile"]) <= float(row["milliseconds"]) <= float(row["highest decile"])
        assert float(row["target tokens/s"]) == pytest.approx(1000 * 15 / float(row["milliseconds"]))
    stash = {row["variant"]: float(row["stash bytes"]) for row in rows if row["dtype"] == "float32"}
    assert stash["reference"] > stash["+ decoder"] > stash["all, gates"] > stash["all, outputs"]


def test_an_interruption_leaves_what_was_measured(
    bench: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Steps.values

    def values(self: Steps, variant: steps.Variant) -> tuple[float, float]:
        if variant.name == "+ output":
            signal.raise_signal(signal.SIGINT)
        return real(self, variant)

    monkeypatch.setattr(Steps, "values", values)
    file = tmp_path / "memory.csv"
    ended = bench("memory", "--quick", "--device", "cpu", "--seconds", "0.1", "--csv", file)
    assert ended.code == 130
    assert {"cross_entropy(linear)", "recompute"} <= {row["variant"] for row in rows_of(file)}
    assert "interrupted; the results so far are above" in ended.err
    assert "output layer, 40 x 8 x 50" in ended.out


def test_a_wrong_variant_ends_the_run(bench: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CheckpointedModel.loss
    monkeypatch.setattr(
        CheckpointedModel, "loss", lambda *arguments, **named: 1.001 * real(*arguments, **named)
    )
    ended = bench("memory", "--quick", "--device", "cpu", "--only", "checkpoint")
    assert ended.code == 1
    assert "checkpoint: attention: loss" in ended.err


def test_bad_lengths_are_refused(bench: Call) -> None:
    ended = bench("memory", "--quick", "--device", "cpu", "--only", "step", "--lengths", "10x")
    assert ended.code == 2
    assert "--lengths 10x: give source x target positions" in ended.err
