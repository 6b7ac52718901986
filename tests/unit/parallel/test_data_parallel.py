"""Several ranks train the model of one: same losses, perplexities, translations and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from econmt.engine.world import World
from econmt.training.tensor_files import read_tensors
from tests.unit.parallel import jobs
from tests.unit.parallel.group import Group
from tests.unit.training import tiny, tiny_text

LONG = ("training.max_updates=200", "training.checkpoint_interval=25")
"""Losses are compared as means over the updates between two checkpoints."""


def recipe_in(folder: Path, text: Path, *, language_model: bool = False) -> Path:
    """A recipe that trains in a folder."""
    template = (tiny_text if language_model else tiny).RECIPE
    path = folder / "recipe.yaml"
    path.write_text(template.format(text=text, output=folder / "run"))
    return path


def train(group: Group, ranks: int, path: Path, text: Path, *overrides: str, name: str = "run") -> Path:
    """Trains with so many ranks, with one in this process; returns the folder."""
    output = path.parent / name
    given = [*overrides, f"output={output}"]
    if ranks == 1:
        jobs.run(World(), path, text, given)
    else:
        said = group.run(ranks, jobs.run, path, text, given)
        assert said[0]
        assert not any(said[1:]), "only rank 0 speaks"
    return output


def assert_like_one(folder: Path, one: Path, tolerance: float = 1e-5) -> None:
    """The figures of each checkpoint, all files and the last parameters are as in another run, up to rounding."""
    mine, other = (tiny.metrics(jobs.ModelFolder(each)) for each in (folder, one))
    assert len(mine) == len(other) > 0
    for ours, theirs in zip(mine, other, strict=True):
        for name in ("update", "target_tokens", "learning_rate", "epoch"):
            assert ours[name] == theirs[name]
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=tolerance)
        assert ours["valid_perplexity"] == pytest.approx(theirs["valid_perplexity"], rel=10 * tolerance)
        assert ours["bleu"] == pytest.approx(theirs["bleu"], nan_ok=True)
    names = [
        {str(path.relative_to(each)) for path in each.rglob("*") if "tensorboard" not in path.parts}
        for each in (folder, one)
    ]
    assert names[0] == names[1]
    for path in one.glob("hypotheses.*"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    last = max(one.glob("params.[0-9]*.safetensors")).name
    found, expected = (read_tensors(each / last)[0] for each in (folder, one))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=100 * tolerance, atol=100 * tolerance)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, text: Path, group: Group) -> Path:
    """A run of one rank, with dropout."""
    path = recipe_in(tmp_path_factory.mktemp("one"), text)
    return train(group, 1, path, text, *LONG)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_train_the_model_of_one(
    group: Group, ranks: int, one: Path, text: Path, tmp_path: Path
) -> None:
    assert_like_one(train(group, ranks, recipe_in(tmp_path, text), text, *LONG), one)
