"""Learns the lexicon of a model folder from parallel text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.lexicons import write_lexicon
from econmt.data.text.corpus import Corpus, read_pairs
from econmt.data.text.lexicon import learn_lexicon
from econmt.data.text.subwords import fingerprint, load_vocabularies, sample_pairs
from econmt.errors import InputError
from econmt.export.model_folder import recipe_of

PAIRS = 300_000
"""Default of the largest number of sentence pairs that a lexicon is learnt from."""


class LearntLexicon(NamedTuple):
    """Numbers of source words that have translations, and of pairs that they were learnt from."""

    words: int
    pairs: int


def make_lexicon(
    folder: Path,
    output: Path,
    corpora: Sequence[Corpus],
    *,
    top_k: int,
    iterations: int = 5,
    pairs: int = PAIRS,
    say: Callable[[str], object] = lambda _: None,
) -> LearntLexicon:
    """Learns the possible translations of each source word by IBM model 1 and writes them to a file.

    Args:
        folder: Model folder, whose vocabularies divide the text.
        output: File to write.
        corpora: Parallel text.
        top_k: Number of translations to keep of each source word.
        iterations: Number of iterations of expectation maximization.
        pairs: Maximum number of sentence pairs, drawn evenly from the text.
        say: Called with the current activity.

    Raises:
        InputError: The folder holds no translation model, or the text has no pair to learn from.
    """
    most = recipe_of(ModelFolder(folder), "econmt lexicon").pairs.max_length
    vocabularies = load_vocabularies(folder)
    say("reading the text")
    count = sum(1 for _ in _not_blank(corpora))
    chosen = list(sample_pairs(_not_blank(corpora), count, pairs))
    if not chosen:
        raise InputError(f"{corpora[0].source}: no sentence pairs to learn from; give other text")
    encoded = zip(
        vocabularies.source.encode_many([pair[0] for pair in chosen]),
        vocabularies.target.encode_many([pair[1] for pair in chosen]),
        strict=True,
    )
    kept = [pair for pair in encoded if max(map(len, pair)) <= most]
    if not kept:
        raise InputError(
            f"{corpora[0].source}: no sentence pair of at most {most} tokens on each side "
            "(data.max_length); give text with shorter sentences"
        )
    doing = f"learning from {len(kept):,} pairs"
    say(doing)
    sizes = vocabularies.source.size, vocabularies.target.size
    learnt = learn_lexicon(kept, sizes, top_k, iterations, lambda text: say(f"{doing}, {text}"))
    table = torch.from_numpy(learnt)
    write_lexicon(output, table, fingerprint(folder))
    return LearntLexicon(int((table[:, 0] > 0).sum()), len(kept))


def _not_blank(corpora: Sequence[Corpus]) -> Iterator[tuple[str, str]]:
    """Yields the pairs in which neither side is blank."""
    for source, target in chain.from_iterable(map(read_pairs, corpora)):
        if source.strip() and target.strip():
            yield source, target
