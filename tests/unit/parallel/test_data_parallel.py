"""Several ranks train the model of one: same losses, perplexities, translations and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from econmt.checkpoint.tensor_files import read_tensors
from econmt.config.recipe import load_recipe
from econmt.engine.communicator import Communicator
from tests.unit.parallel import jobs
from tests.unit.parallel.group import Group
from tests.unit.training import tiny, tiny_text

NOISY = ("data.mixing={weights: [[1]], epoch_pairs: 13}", "data.noise={upper: 0.3, typos: 0.3, markup: 0.3}")
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
        jobs.run(Communicator(), path, text, given)
    else:
        settings = load_recipe(path, given).parallel.model_dump()
        said = group.run(ranks, jobs.run, path, text, given, **settings)
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
    paths = [{path.relative_to(each) for path in each.rglob("*")} for each in (folder, one)]
    names = [{path for path in each if "tensorboard" not in path.parts} for each in paths]
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


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.thorough) for n in (3, 4))],
)
def test_ranks_train_the_model_of_one(
    group: Group, ranks: int, one: Path, text: Path, tmp_path: Path
) -> None:
    assert_like_one(train(group, ranks, recipe_in(tmp_path, text), text, *LONG), one)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "overrides",
    [
        ("training.update_interval=3", "training.batch={type: word, size: 20}"),
        ("training.optimizer={name: sgd, learning_rate: 0.5, momentum: 0.9}", "model.dropout=0.3"),
        ("training.batch.size=2", "training.max_buckets=2", "training.bucket_width=null"),
        pytest.param(("training.bucket_width=null", *NOISY), marks=pytest.mark.thorough),
    ],
    ids=["accumulated updates", "momentum", "fewer rows than ranks", "mixture with noise"],
)
def test_whatever_the_recipe(group: Group, text: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    path = recipe_in(tmp_path, text)
    short = ("training.max_updates=6", "training.decode_and_evaluate=2", *overrides)
    alone = train(group, 1, path, text, *short, name="alone")
    assert_like_one(train(group, 3, path, text, *short), alone)


@pytest.mark.slow
def test_a_rank_without_memory_makes_all_divide_the_batch(group: Group, text: Path, tmp_path: Path) -> None:
    path = recipe_in(tmp_path, text)
    given = ("model.weight_tying=trg_softmax", "training.memory_budget=16MiB", "training.max_updates=4")
    alone = train(group, 1, path, text, *given, name="alone")
    assert_like_one(train(group, 2, path, text, *given), alone)
    said = group.run(2, jobs.short_of_memory, path, text, [*given, f"output={tmp_path / 'short'}"])
    assert "out of memory on cpu for 2 pairs" in said[0]
    assert "training ended: max_updates 4 reached" in said[0]


@pytest.mark.slow
def test_a_language_model_is_that_of_one_rank(group: Group, lines: Path, tmp_path: Path) -> None:
    path = recipe_in(tmp_path, lines, language_model=True)
    given = ("training.batch.size=5", "training.bptt_jitter=true", "training.valid_rows=3")
    alone = train(group, 1, path, lines, *given, name="alone")
    shared = train(group, 2, path, lines, *given)
    assert_like_one(shared, alone)
    file = "training_state/00012/optimizer.safetensors"
    mine, other = (read_tensors(each / file)[0]["carried/carried"] for each in (shared, alone))
    torch.testing.assert_close(mine[:, :, 1:], other[:, :, 1:], rtol=1e-4, atol=1e-5)
    assert mine[:, :, 1:].abs().sum(dim=(0, 1, 3)).min() > 0, "every rank's rows are there"


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(
    group: Group, lines: Path, text: Path, tmp_path: Path
) -> None:
    for kind, place in ((True, lines), (False, text)):
        folder = tmp_path / str(kind)
        folder.mkdir()
        path = recipe_in(folder, place, language_model=kind)
        alone = train(group, 1, path, place, "training.max_updates=8", name="alone")
        for ranks, updates in ((2, 4), (1, 6), (3, 8)):
            # A run that ends validates, so that each end is a checkpoint of the run alone.
            given = (f"training.max_updates={updates}", "training.checkpoint_interval=2")
            shared = train(group, ranks, path, place, *given)
        mine, other = (tiny.metrics(jobs.ModelFolder(each))[-1] for each in (shared, alone))
        assert mine["update"] == other["update"] == 8
        assert mine["valid_perplexity"] == pytest.approx(other["valid_perplexity"], rel=1e-4)


@pytest.mark.slow
def test_ranks_that_share_the_optimizer_save_what_one_saves(group: Group, text: Path, tmp_path: Path) -> None:
    path = recipe_in(tmp_path, text)
    plain = train(group, 2, path, text, name="plain")
    shared = train(group, 2, path, text, "parallel.shard_optimizer=true", name="shared")
    files = [tiny.snapshot(jobs.ModelFolder(each)) for each in (plain, shared)]
    assert files[0] == files[1]


@pytest.mark.parametrize("shares", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_ranks_agree_on_float16_overflows(group: Group, text: Path, tmp_path: Path, *, shares: bool) -> None:
    """An overflow on any rank is one of all, and halves the scale of all, whoever holds the optimizer's state."""
    path = recipe_in(tmp_path, text)
    scale = ("training.precision=float16", f"training.loss_scale={2**10}", "training.loss_scale_window=2")
    first, second = group.run(2, jobs.float16_updates, path, text, scale, shard_optimizer=shares)
    assert first == second
    assert [skipped for _, skipped, _ in first] == [0, 0, 1, 1, 2]
    assert [factor for factor, _, _ in first] == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**9]
    one, two, three, four, five = [total for _, _, total in first]
    assert (two, four) == (three, five)
    assert len({one, two, four}) == 3
