"""However the ops are computed, training learns the same, and tags land on the aligned words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import econmt
from econmt.config.recipe import load_recipe
from econmt.data.batching.batches import Batch, pad_batch
from econmt.data.text.number_words import english, german
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.tasks.translation import TranslationTask
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.core.chunks import STASHES
from tests.conftest import run_python

FILE = Path(__file__).with_name("golden_losses.json")
"""Losses of the reference, so that a change of it is seen; GOLDEN=write in the environment writes them anew."""
UPDATES = 200
VOCABULARY = 23
REFERENCE = Implementations.everywhere("reference")
MODEL = [
    "model.embedding=6",
    "model.encoder.size=8",
    "model.encoder.layers=2",
    "model.decoder.size=8",
    "model.decoder.layers=2",
    "model.attention.size=7",
    "model.dropout=0.1",
    "training.label_smoothing=0.1",
    "training.optimizer.learning_rate=0.005",
    "training.gradient_clipping.type=none",
]
WHOLE_TARGET = "model.decoder.input_feeding=false model.encoder.layers=1 model.weight_tying=trg_softmax"
KINDS = {"input feeding": ["model.attention.layer_norm=true"], "whole target": WHOLE_TARGET.split()}
"""Keys in which the two models differ."""


def batches() -> Iterator[Batch]:
    """Yields batches of sequences and their reverses, of many shapes, the same in every run."""
    draw = torch.Generator().manual_seed(11)
    for _ in range(UPDATES):
        rows, longest = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((1, 5), (1, 4)))
        lengths = torch.randint(1, longest + 1, (rows,), generator=draw).numpy()
        source = torch.randint(4, VOCABULARY, (rows, longest + 1), generator=draw).numpy()
        target = source.copy()
        for row, length in enumerate(lengths):
            target[row, :length] = source[row, :length][::-1]
        yield pad_batch(np.arange(rows), source, lengths, target, lengths, (longest + 1, longest + 1))


def curve(kind: str, implementations: Implementations, updates: int = UPDATES) -> list[float]:
    """Returns the loss a token of every update, in nats, float32 on the CPU."""
    config = load_recipe("quickstart", [*MODEL, *KINDS[kind]])
    with torch.random.fork_rng():
        torch.manual_seed(5)
        task = TranslationTask(config, VOCABULARY, VOCABULARY)
        step = TrainingStep(task, task.build_model().train(), implementations=implementations)
        losses = []
        for batch in islice(batches(), updates):
            total, *_ = step.gradient([batch], step.tokens([batch]))
            # Clipped by PyTorch: the curves that are kept have its rounding.
            step.optimizer.make_dense()
            torch.nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
            step.update()
            losses.append((total / batch.target_tokens).item())
    return losses


def settings_of(kind: str, name: str) -> list[Implementations]:
    """Returns each op alone with another implementation, and all ops with every stash level where they differ.

    Compiled ops run the steps of the recomputing ones and compile for long: one run with all of them is enough.
    """
    everything = [Implementations.everywhere(name, level) for level in STASHES]
    alone = [REFERENCE._replace(**{op: name}) for op in ("decoder", "encoder", "output")]
    if name == "compiled":
        return everything[:1] if kind == "input feeding" else []
    if kind == "input feeding":
        return [*alone, *everything]
    return [REFERENCE._replace(attention=name), everything[0]]


CASES = [
    pytest.param(kind, setting, marks=pytest.mark.thorough if name == "compiled" else ())
    for kind in KINDS
    for name in ["recompute", *(["compiled"] if has_compiler() else [])]
    for setting in settings_of(kind, name)
]

FIRST = 60
"""Updates of the implementations, whose differences would grow from one to the next."""


@cache
def reference(kind: str) -> list[float]:
    return curve(kind, REFERENCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_what_it_was(kind: str) -> None:
    golden, losses = json.loads(FILE.read_text(encoding="utf-8")), reference(kind)
    if os.environ.get("GOLDEN") == "write":
        golden[kind] = losses
        FILE.write_text(json.dumps(golden, indent=0) + "\n", encoding="utf-8")
    assert set(golden) == set(KINDS)
    assert len(losses) == len(golden[kind]) == UPDATES
    assert losses == pytest.approx(golden[kind], rel=1e-4)
    # The run has learnt something: a mistake in a gradient would show.
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what does not matter here
@pytest.mark.parametrize(
    ("kind", "setting"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_every_implementation_learns_what_the_reference_learns(kind: str, setting: Implementations) -> None:
    assert curve(kind, setting, FIRST) == pytest.approx(reference(kind)[:FIRST], rel=1e-5)


NUMBERS = (*range(2, 10), 100, 1000, 20, 30, 40, 50, 60)
ENGLISH, GERMAN = ([words(each).split()[-1] for each in NUMBERS] for words in (english, german))
MEANS = dict(zip(ENGLISH, GERMAN, strict=True))


@pytest.mark.thorough
def test_tags_land_on_the_words_that_translate_theirs(tmp_path: Path) -> None:
    run_python("-m", "econmt", "train", "quickstart", f"output={tmp_path / 'run'}", cwd=tmp_path)
    model = econmt.load(tmp_path / "run", device="cpu")
    lines, words = [], []
    for number in range(32):
        thousands, hundreds, ones = (ENGLISH[:8][(number + step) % 8] for step in (0, 3, 6))
        plain = f"{thousands} thousand {hundreds} hundred and {ENGLISH[10 + number % 5]} {ones}".split()
        at = [0, 1, 2, 3, 5, 6][number % 6]
        words.append(plain[at])
        lines.append(" ".join(f"<b>{word}</b>" if place == at else word for place, word in enumerate(plain)))
    plain_texts = [each.text for each in model.translate([re.sub("<.*?>", "", line) for line in lines])]
    found = [each.text for each in model.translate(lines, markup=True)]
    assert [re.sub("<.*?>", "", text).split() for text in found] == [text.split() for text in plain_texts]
    inside = [text.partition("<b>")[2].partition("</b>")[0].split() for text in found]
    landed = [MEANS[word] in words for word, words in zip(words, inside, strict=True)]
    assert sum(landed) >= 30
    assert sum(map(len, inside)) <= 1.5 * len(inside), "and on few others"
