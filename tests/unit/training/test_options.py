"""Options of training, each in a run: those of other toolkits, smaller steps, and sparse gradients."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import sacrebleu
import torch
import yaml

from econmt.checkpoint.checkpoints import load_model
from econmt.checkpoint.folder import Commit
from econmt.checkpoint.tensor_files import read_tensors, write_tensors
from econmt.engine.parameters import in_float32
from econmt.errors import InputError
from econmt.training.progress import Progress
from econmt.training.trainer import Trainer
from tests.unit.engine.toy import assert_same_bits, parameters
from tests.unit.training.tiny import MakeRun, leave, metrics


@pytest.mark.parametrize(
    ("metric", "better"), [("chrf", max), pytest.param("ter", min, marks=pytest.mark.thorough)]
)
def test_chrf_and_ter_decide_which_checkpoint_is_best(
    make_run: MakeRun, metric: str, better: Callable[..., float]
) -> None:
    stops = f"training.early_stopping.metric={metric}"
    run = make_run(stops, "training.optimizer.learning_rate=0.1", "training.max_updates=6")
    result = run.train()
    rows = {int(row["update"]): row for row in metrics(run.folder)}
    assert len({row[metric] for row in rows.values()}) > 1
    assert rows[result.best_update][metric] == better(row[metric] for row in rows.values())
    hypotheses = run.folder.hypotheses(result.best_update).read_text().splitlines()
    reference = (run.text / "valid.trg").read_text().splitlines()
    kind = sacrebleu.CHRF() if metric == "chrf" else sacrebleu.TER()
    expected = kind.corpus_score(hypotheses, [reference])
    assert rows[result.best_update][metric] == pytest.approx(expected.score)
    assert f"{expected.name} {expected.score:.2f} (nrefs:1|" in run.said()


AVERAGING = "training.averaging={start: at-once, decay: 0.6}"


def steps(trainer: Trainer, count: int) -> dict[str, torch.Tensor]:
    """Makes so many updates; the parameters after them."""
    for _ in range(count):
        trainer._update(Progress.silent())
    return parameters(trainer.model)


def test_a_mean_that_another_optimizer_left_begins_anew(make_run: MakeRun) -> None:
    trainer = make_run(AVERAGING).trainer()
    steps(trainer, 3)
    leave(trainer)
    means, _ = read_tensors(trainer.folder.state(Commit(3, False)) / "params.safetensors")
    other = make_run(AVERAGING, "training.optimizer.name=sgd").trainer(resume_with_changes=True)
    assert_same_bits(parameters(other.model), means)
    assert other.state.average_from == 3
    trainer = make_run("training.averaging={start: non-monotone}", name="another").trainer()
    steps(trainer, 2)
    leave(trainer)
    other = make_run(AVERAGING, name="another").trainer(resume_with_changes=True)
    assert other.state.average_from == 2, "another rule has not begun it"


def test_copies_of_the_state_are_saved_with_what_the_mean_displaces(make_run: MakeRun) -> None:
    """As pipelines and shares of the optimizer give them."""
    trainer = make_run(AVERAGING).trainer()
    wanted = steps(trainer, 3)
    real = trainer.step.optimizer_tensors
    trainer.step.optimizer_tensors = lambda: {name: value.clone() for name, value in real().items()}  # type: ignore[method-assign]
    leave(trainer)
    found = make_run(AVERAGING).trainer()
    assert_same_bits(parameters(found.model), wanted)


def test_names_that_are_fixed(make_run: MakeRun) -> None:
    tied = "model.weight_tying=trg_softmax", "training.fixed_param_names=[output.weight]"
    assert not make_run(*tied, name="tied").trainer().model.target_embedding.weight.requires_grad, (
        "one parameter"
    )
    for given, message in {
        r"['encoder']": "fixed_param_names encoder: matches no parameter; the model has source_embedding.weight, ",
        r"['.*']": "leaves no parameter to train",
        r"['(']": "not a valid regular expression",
    }.items():
        with pytest.raises(InputError, match=message):
            make_run(f"training.fixed_param_names={given}", name="wrong").trainer()


FORMER = {
    "lhuc": "none",
    "encoder": {"first_residual_layer": 2},
    "decoder": {"first_residual_layer": 2, "attention_in_upper_layers": False},
    "attention": {"mhdot_heads": 8, "function": "softmax", "use_prev_word": False},
    "dropout": {"states": 0.0, "recurrent": 0.0, "zoneout_hidden": 0.0, "zoneout_cell": 0.0},
}
"""Keys of former options, as earlier versions wrote them."""


def test_a_folder_of_an_earlier_version_goes_on(make_run: MakeRun) -> None:
    """With the keys of former options in its recipe and in its parameter files."""
    keys = ("model.dropout={layers: 0.1}",)
    whole = make_run(*keys, name="whole").trained()
    make_run(*keys, "training.max_updates=4", name="parts").train()
    parts = make_run(*keys, name="parts")

    def aged(section: dict[str, Any]) -> dict[str, Any]:
        pairs = {key: {**section[key], **part} for key, part in FORMER.items() if isinstance(part, dict)}
        return {**section, "lhuc": "none", **pairs}

    recipe = yaml.safe_load(parts.folder.recipe.read_text())
    recipe["model"] = aged(recipe["model"])
    parts.folder.recipe.write_text(yaml.safe_dump(recipe))
    for path in parts.folder.path.rglob("params.*.safetensors"):
        tensors, metadata = read_tensors(path)
        metadata["model"] = json.dumps(aged(json.loads(metadata["model"])))
        write_tensors(path, tensors, metadata)
    assert set(load_model(parts.folder.path).model.state_dict()) == set(read_tensors(whole.folder.best)[0])
    parts.train()
    assert_same_bits(*(read_tensors(run.folder.best)[0] for run in (whole, parts)))


NARROW = ("training.param_dtype=bfloat16", "training.precision=bfloat16")
BY_VALUE = "training.gradient_clipping={type: value, threshold: 0.1}"


def test_saved_parameters_are_float32_files_of_values_of_bfloat16(make_run: MakeRun) -> None:
    frozen = "training.fixed_param_names=[source_embedding.weight]"
    run = make_run(*NARROW, frozen, "training.optimizer={name: adam8bit, learning_rate: 0.02}").trained()
    tensors, _ = read_tensors(run.folder.parameters(8))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    fixed = tensors.pop("source_embedding.weight")
    assert not fixed.equal(fixed.bfloat16().float()), "what is not trained needs no rounding"
    matrices = [tensor for tensor in tensors.values() if tensor.dim() > 1]
    assert all(tensor.equal(tensor.bfloat16().float()) for tensor in matrices)


def test_values_set_in_float32_are_rounded_in_place() -> None:
    matrix = torch.nn.Parameter(torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16))
    vector = torch.nn.Parameter(torch.tensor([1.0]))
    address = matrix.data_ptr()
    with in_float32([matrix, vector]):
        assert matrix.dtype == torch.float32
        assert matrix.tolist() == [[1.0, 3.0]]
        with torch.no_grad():
            matrix[0, 1] = 1.0 + 2.0**-10
    assert matrix.dtype == torch.bfloat16
    assert matrix.data_ptr() == address
    assert matrix.tolist() == [[1.0, 1.0]]


@pytest.mark.slow
def test_a_step_that_has_updated_parameters_is_not_repeated(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the backward pass: the plan would make parts, but some parameters have changed."""
    monkeypatch.setattr("econmt_ops.optimizers.in_backward.GROUP_BYTES", 1)
    budget = "training.memory_budget=1GiB"
    for when, message in (("always", "out of memory"), ("never", "")):
        trainer: Trainer = make_run(
            BY_VALUE, budget, f"training.optimizer_in_backward={when}", name=when
        ).trainer()
        batches = [next(trainer.batches)]
        failures = itertools.count()
        first = next(iter(trainer.parameters.values()))

        def fail(_gradient: torch.Tensor, failures: itertools.count[int] = failures) -> None:
            if next(failures) == 0:
                raise MemoryError

        hook = first.register_hook(fail)
        try:
            if message:
                with pytest.raises(Exception, match=message):
                    trainer.gradient(batches, updates=True)
            else:
                trainer.gradient(batches, updates=True)
        finally:
            hook.remove()
