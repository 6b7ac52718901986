from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from econmt.errors import InputError
from econmt.training.run import run_recipe
from econmt.training.tensor_files import read_tensors
from tests.unit.training.tiny import Run

MakeRun = Callable[..., Run]


@pytest.fixture
def first(make_run: MakeRun) -> Run:
    run = make_run("training.max_updates=2", name="first")
    run.train()
    return run


def start(run: Run) -> dict[str, torch.Tensor]:
    """The parameters with which a run begins."""
    return {name: part.detach() for name, part in run.trainer().model.named_parameters()}


def test_a_run_begins_with_the_parameters_of_another(make_run: MakeRun, first: Run) -> None:
    expected, _ = read_tensors(first.folder.best)
    for place in (first.folder.path, first.folder.best):
        second = make_run(f"training.initialize_from={place}", name=f"second-{place.name}")
        found = start(second)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(start(make_run(name="other"))["output.weight"], expected["output.weight"])


def test_it_is_said_recorded_and_counts_from_nothing(make_run: MakeRun, first: Run) -> None:
    second = make_run(f"training.initialize_from={first.folder.path}", name="second")
    result = second.train()
    assert result.update == 8
    assert f"first parameters: those of update 2 in {first.folder.best}" in second.said()
    assert f"initialize_from: {first.folder.path}" in second.folder.recipe.read_text()


def test_going_on_needs_the_other_model_no_more(make_run: MakeRun, first: Run) -> None:
    key = f"training.initialize_from={first.folder.path}"
    make_run(key, name="whole").train()
    make_run(key, "training.max_updates=4", name="parts").train()
    first.folder.best.unlink()
    parts = make_run(key, name="parts")
    parts.train()
    whole, _ = read_tensors(make_run(key, name="whole").folder.best)
    found, _ = read_tensors(parts.folder.best)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    with pytest.raises(InputError, match=r"another recipe: training\.initialize_from .* -> null"):
        make_run(name="parts").train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("training.initialize_from=nowhere",), "training.initialize_from nowhere: no such file or folder"),
        (("model.decoder.size=6",), "was trained with model.decoder .*; give the recipe the model section of that"),
        (("model.decoder.rank=3",), "was trained with model.decoder .*rank"),
        (("data.subwords={type: words, source: 6, target: 50}", "data.prepared=null"), "its vocabulary is another one"),
        (("output={first}/inside",), None),
        (("output={first}",), "lies in the folder that this run writes; give another output=DIR"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_clear_line(
    make_run: MakeRun, first: Run, changes: tuple[str, ...], message: str | None
) -> None:
    filled = tuple(change.replace("{first}", str(first.folder.path)) for change in changes)
    run = make_run(f"training.initialize_from={first.folder.path}", *filled, name="second")
    before = first.folder.best.read_bytes()

    def train() -> None:
        run_recipe(run.recipe, [run.text], console=run.console, overwrite_output=True)

    if message is None:
        train()
    else:
        with pytest.raises(InputError, match=message) as caught:
            train()
        assert len(str(caught.value).splitlines()) == 1
    assert first.folder.best.read_bytes() == before


def test_a_broken_file_is_named(make_run: MakeRun, first: Run) -> None:
    first.folder.best.write_bytes(b"nonsense, and long enough")
    run = make_run(f"training.initialize_from={first.folder.path}", name="second")
    with pytest.raises(InputError, match=re.escape(f"{first.folder.best}: not a safetensors file")):
        run.train()
