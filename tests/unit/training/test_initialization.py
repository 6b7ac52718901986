from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from econmt.checkpoint.checkpoints import load_model
from econmt.checkpoint.tensor_files import read_tensors
from econmt.data.batching.store import PreparedData
from econmt.errors import InputError
from econmt.training.initialization import parameters_to_start_from
from econmt.training.run import run_recipe
from tests.unit.engine.toy import assert_same_bits, parameters
from tests.unit.training.tiny import MakeRun, Run


@pytest.fixture
def first(make_run: MakeRun) -> Run:
    return make_run("training.max_updates=2", name="first").trained()


def test_a_run_begins_with_the_parameters_of_another(make_run: MakeRun, first: Run) -> None:
    """It is said, recorded, and its updates are counted from nothing."""
    expected, _ = read_tensors(first.folder.best)
    moved, kept = first.folder.path.with_name("moved.safetensors"), "training.update_vocab=true"
    shutil.copy(first.folder.best, moved)
    for place, *more in ((first.folder.path,), (moved, kept), (first.folder.best,)):
        more += [f"training.initialize_from={place}", "training.max_updates=3"]
        second = make_run(*more, name=f"second-{place.name}")
        assert_same_bits(parameters(second.trainer().model), expected)
    other = parameters(make_run(name="other").trainer().model)
    assert not torch.equal(other["output.weight"], expected["output.weight"])
    assert second.train().update == 3
    assert f"initial parameters: update 2 of {first.folder.best}" in second.said()
    assert f"initialize_from: {first.folder.best}" in second.folder.recipe.read_text()


def test_going_on_needs_the_other_model_no_more(make_run: MakeRun, first: Run) -> None:
    key = f"training.initialize_from={first.folder.path}"
    make_run(key, name="whole").train()
    make_run(key, "training.max_updates=4", name="parts").train()
    first.folder.best.unlink()
    parts = make_run(key, name="parts").trained()
    runs = parts, make_run(key, name="whole")
    assert_same_bits(*(read_tensors(run.folder.best)[0] for run in runs))
    with pytest.raises(InputError, match=r"another recipe: training\.initialize_from .* -> null"):
        make_run(name="parts").train()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("training.initialize_from=nowhere",), "training.initialize_from nowhere: no such file or folder"),
        (("model.decoder.size=6",), "was trained with model.decoder .*; copy that model's model section into"),
        (("model.decoder.rank=3",), "was trained with model.decoder .*rank"),
        (("data.subwords={type: words, source: 6, target: 50}", "data.prepared=null"), "another vocabulary .*update_vocab"),
        (("output={first}/inside",), None),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_clear_line(
    make_run: MakeRun, first: Run, changes: tuple[str, ...], message: str | None
) -> None:
    filled = tuple(change.replace("{first}", str(first.folder.path)) for change in changes)
    run = make_run(f"training.initialize_from={first.folder.path}", *filled, name="second")
    before = first.folder.best.read_bytes()
    one_line = pytest.raises(InputError, match=rf"\A.*{message}.*\Z")
    with one_line if message else nullcontext():
        run_recipe(run.recipe, [run.text], console=run.console, overwrite_output=True)
    assert first.folder.best.read_bytes() == before


@pytest.mark.parametrize("place", ["", "params.best.safetensors", "deeper/params"])
def test_what_the_run_overwrites_is_no_beginning(make_run: MakeRun, place: str) -> None:
    run = make_run()
    named = run.folder.path / place
    (named.parent if place else named).mkdir(parents=True)
    if place:
        named.touch()
    run = make_run(f"training.initialize_from={named}")
    with pytest.raises(InputError, match="is in the folder that this run writes"):
        parameters_to_start_from(run.recipe)


def rows(model: torch.nn.Module, prepared: PreparedData) -> dict[str, dict[str, torch.Tensor]]:
    """Of each matrix with a row a token: its rows by token."""
    sides = {"source_embedding": "source", "target_embedding": "target", "output": "target"}
    found = {}
    for name, part in model.named_parameters():
        if name.partition(".")[0] in sides:
            known = getattr(prepared.vocabularies, sides[name.partition(".")[0]])
            found[name] = dict(zip(known.tokens(range(known.size)), part.detach(), strict=True))
    return found


def test_another_vocabulary_keeps_the_rows_of_its_tokens(
    make_run: MakeRun, first: Run, text: Path, tmp_path: Path
) -> None:
    """Half of the letters are new, and what was known stands in another order."""
    new = tmp_path / "new"
    new.mkdir()
    for path in text.glob("*.*g"), text.glob("*.src"):
        for file in path:
            other = file.read_text().translate(str.maketrans("abcdABCD", "wxyzWXYZ"))
            (new / file.name).write_text("".join(f"{line} h g\n" for line in other.splitlines()))
    keys = (f"data.train=[{new}/train]", f"data.valid={new}/valid", f"data.prepared={tmp_path}/prepared")
    start_from = f"training.initialize_from={first.folder.path}"
    more = ("training.update_vocab=true", "training.max_updates=1")
    second = make_run(*keys, start_from, *more, name="second")
    trainer, drawn = second.trainer(), make_run(*keys, name="drawn").trainer()
    before = rows(load_model(first.folder.path).model, first.prepared())
    after, fresh = rows(trainer.model, second.prepared()), rows(drawn.model, second.prepared())
    tables = {"source_embedding.weight", "target_embedding.weight", "output.weight", "output.bias"}
    assert after.keys() == before.keys() == tables
    for name, found in after.items():
        letters = "ehwy" if name.startswith("source") else "EHWY"
        assert found.keys() != before[name].keys()
        assert set(letters) < found.keys()
        for token, row in found.items():
            expected = before[name] if token in before[name] else fresh[name]
            assert torch.equal(row, expected[token])
    others = {name for name in trainer.parameters if name not in after}
    expected_others = dict(load_model(first.folder.path).model.named_parameters())
    assert all(torch.equal(trainer.parameters[name], expected_others[name]) for name in others)
    second.train()
    assert "source vocabulary: 8 of 12 tokens are known there, other rows are random" in second.said()
