"""How long the sentences of a text are, and the shapes of batches that follow, with derived buckets and without any."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from econmt.config.model import Model
from econmt.config.recipe import Recipe
from econmt.data.batching.batches import rows_of_batch
from econmt.data.batching.bucket_shapes import Counts, Derived, choose, derive_shapes
from econmt.data.batching.pair_flops import PairFlops, pair_flops
from econmt.data.text.corpus import read_lines
from econmt.errors import InputError
from econmt.parallel.cost_layers import Batch

Buckets = Literal["derived", "none"]


class TextFigures(NamedTuple):
    """What is published of the lengths of a text that cannot be had.

    Attributes:
        sentences: how many. words: of all of them, ends not counted. longest: words of the longest.
        most, held: ``held`` sentences have at most ``most`` words.
        source: where the figures are from.
    """

    sentences: int
    words: int
    longest: int
    most: int
    held: int
    source: str


PENN_TREEBANK = TextFigures(
    42_068,
    929_589 - 42_068,
    82,
    45,
    40_677,
    "sentences: huggingface.co/datasets/ptb_text_only; words: edwardlib.org/api/observations/ptb; 45 and fewer: "
    "github.com/DanHrmti/SenTransformer-VAE-pytorch; the longest is known to have 82 words",
)


def counts_of_figures(text: TextFigures) -> Counts:
    """How many sentences of each length there are if lengths follow a gamma distribution, as sentences' do roughly.

    Its two parameters follow from the mean length and from the share of short sentences (Sichel, 1974, compares such
    distributions with text). What would be longer than the longest is as long as that, which makes it no longer: the
    distribution alone would have one of 98 words in the Penn Treebank.

    Returns:
        (2, T + 1): see :data:`econmt.data.batching.bucket_shapes.Counts`; there is one source position.
    """
    mean, share = text.words / text.sentences, text.held / text.sentences

    low, high = 0.1, 100.0  # the larger, the more alike are the lengths
    for _ in range(60):
        middle = (low + high) / 2.0
        short = _held(torch.tensor(text.most + 0.5, dtype=torch.float64), middle, mean).item()
        low, high = (middle, high) if short < share else (low, middle)
    ends = torch.arange(text.longest + 1, dtype=torch.float64) + 0.5
    up_to = text.sentences * _held(ends, low, mean)
    up_to[0], up_to[-1] = 0.0, text.sentences
    counts = np.zeros((2, text.longest + 2), dtype=np.int64)
    counts[1, 2:] = np.diff(np.round(up_to.numpy())).astype(np.int64)
    return counts


def _held(ends: torch.Tensor, form: float, mean: float) -> torch.Tensor:
    """Shares of a gamma distribution up to some places, float64."""
    shares: torch.Tensor = torch.special.gammainc(torch.full_like(ends, form), ends * (form / mean))
    return shares


def counts_of_texts(texts: list[Path], recipe: Recipe) -> Counts:
    """The lengths of the sentences of files, in words, one for its end added.

    Args:
        texts: one for a language model; for a translation model source and target.
        recipe: which of them it is; pairs that are longer than it allows are left out.

    Raises:
        InputError: too many or too few files, or not as many lines in both; no line has words.
    """
    sides = 2 if isinstance(recipe.model, Model) else 1
    if len(texts) != sides:
        wanted = "two files, source and target" if sides == 2 else "one file"
        raise InputError(f"--text: {recipe.name} needs {wanted}, found {len(texts)}")
    lengths = [
        np.array([len(line.split()) + 1 for line in read_lines(path)], dtype=np.int64) for path in texts
    ]
    if sides == 1:
        lengths.insert(0, np.ones_like(lengths[0]))
    if len(lengths[0]) != len(lengths[1]):
        raise InputError(
            f"{texts[0]} has {len(lengths[0])} lines, {texts[1]} {len(lengths[1])}; give files that fit"
        )
    kept = (lengths[1] > 1) & (lengths[0] > (1 if sides == 2 else 0))
    if sides == 2:
        kept &= np.maximum(*lengths) <= recipe.pairs.max_length + 1
    if not kept.any():
        raise InputError(f"{texts[0]}: no line that training would use; give another file")
    source, target = (side[kept] for side in lengths)
    counts = np.zeros((source.max() + 1, target.max() + 1), dtype=np.int64)
    np.add.at(counts, (source, target), 1)
    return counts


def batches_of_text(recipe: Recipe, counts: Counts, words: int, buckets: Buckets) -> list[Batch]:
    """The shapes of updates on a text, each with its share of them.

    Args:
        recipe: whose model and batch it is. counts: of the lengths.
        words: entries of the output layer.
        buckets: "derived" as a run derives them; "none": every pair is as long as the longest.
    """
    pairs = isinstance(recipe.model, Model)
    work = pair_flops(recipe.model, words) if isinstance(recipe.model, Model) else PairFlops(0, 1, 0)
    if buckets == "none":
        shapes = np.argwhere(counts).max(axis=0)[None]
    else:
        shapes = derive_shapes(counts, Derived(recipe.training.max_buckets, work))
    chosen = choose(counts.shape, shapes, work)
    lengths = np.arange(counts.shape[1])
    found = []
    for number, (source, target) in enumerate(shapes.tolist()):
        held = np.where(chosen == number, counts, 0)
        rows, sentences = rows_of_batch(recipe.training.batch, target), int(held.sum())
        if sentences:
            tokens = float((held * lengths).sum()) / sentences * rows
            found.append(Batch(rows, source if pairs else 0, target, tokens, sentences / rows))
    return found
