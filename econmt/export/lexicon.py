"""Lexicons, tensor files with the translations of every source word: learnt from text, written and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.checkpoint.checkpoints import check_vocabulary
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.tensor_files import FORMAT, read_tensors, write_tensors
from econmt.config import limits
from econmt.data.files import writing
from econmt.data.text.corpus import Corpus, read_pairs
from econmt.data.text.lexicon import learn_lexicon
from econmt.data.text.subwords import fingerprint, load_vocabularies, sample_pairs
from econmt.data.text.vocabulary import Vocabularies
from econmt.errors import InputError
from econmt.export.model_folder import recipe_of

_TABLE = "lexicon"


def write_lexicon(path: Path, table: Tensor, vocabulary: str) -> None:
    """Writes a table from :func:`econmt.data.text.lexicon.learn_lexicon`, with the vocabularies' fingerprint."""
    write_tensors(path, {_TABLE: table}, {"format": FORMAT, "vocabulary": vocabulary})


def read_lexicon(path: Path, vocabulary: str, vocabularies: Vocabularies) -> Tensor:
    """Reads the table of a lexicon for these vocabularies, (source vocabulary, K) int32."""
    tensors, metadata = read_tensors(Path(path))
    if list(tensors) != [_TABLE]:
        raise InputError(f"{path}: not a lexicon; use a file written by econmt lexicon")
    check_vocabulary(metadata, vocabulary, path)
    table = tensors[_TABLE]
    valid = table.dtype == torch.int32 and table.dim() == 2 and len(table) == vocabularies.source.size
    if not valid or not ((table >= 0) & (table < vocabularies.target.size)).all():
        raise InputError(
            f"{path}: a damaged lexicon (shape {tuple(table.shape)}); create it again with econmt lexicon"
        )
    return table


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
    limits.check_whole("top_k", top_k, limits.SHORTLIST)
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
    with writing(Path(output)):
        write_lexicon(Path(output), torch.from_numpy(learnt), fingerprint(folder))
    return LearntLexicon(len({word for source, _ in kept for word in source}), len(kept))


def _not_blank(corpora: Sequence[Corpus]) -> Iterator[tuple[str, str]]:
    """Yields the pairs in which neither side is blank."""
    for source, target in chain.from_iterable(map(read_pairs, corpora)):
        if source.strip() and target.strip():
            yield source, target
