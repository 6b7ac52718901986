"""``econmt lexicon``: learns a lexicon of word translations for ``translate --restrict-lexicon``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.lexicons import write_lexicon
from econmt.cli.option_groups import option
from econmt.cli.options import DataDirOption, ModelOption, check_not_of_model, check_writable
from econmt.config import limits
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.data.text.corpus import Corpus, find_corpus, read_pairs, search_path
from econmt.data.text.lexicon import learn_lexicon
from econmt.data.text.subwords import fingerprint, load_vocabularies, sample_pairs
from econmt.decoding.streams import check_not_read
from econmt.errors import InputError, printable
from econmt.export.model_folder import recipe_of

_PAIRS = 300_000


def lexicon(
    model: ModelOption,
    output: Path = option(..., "--output", "-o", help="File to write."),
    corpora: list[Path] | None = option(
        None,
        "--corpus",
        help="Parallel text, named as in data.train; several are read one after the other.",
        show_default="the recipe's training text",
    ),
    top_k: int = option(
        100, "-k", help="Number of translations to keep of each source word.", min=1, max=limits.SHORTLIST
    ),
    iterations: int = option(5, help="Iterations of expectation maximization.", min=1, max=limits.ITERATIONS),
    pairs: int = option(
        _PAIRS, help="Maximum number of sentence pairs, drawn evenly from the text.", min=1, max=limits.LINES
    ),
    data_dir: DataDirOption = None,
) -> None:
    """Learn the possible translations of each source word by IBM model 1 from a model's training text.

    \b
    Example:
      econmt lexicon -m runs/multi30k -o multi30k.lexicon
      econmt translate -m runs/multi30k --restrict-lexicon multi30k.lexicon
    """
    folder = ModelFolder(model)
    data = recipe_of(folder, "econmt lexicon").pairs
    check_writable(output)
    check_not_of_model(output, [model])
    vocabularies = load_vocabularies(folder.path)
    search = search_path(None, data_dir)
    named = data.train if corpora is None else [str(corpus) for corpus in corpora]
    sources = [find_corpus(prefix, data.source, data.target, search, True) for prefix in named]
    check_not_read(output, [path for corpus in sources for path in corpus.files])
    with status_line() as say:
        say("reading the text")
        count = sum(1 for _ in _not_blank(sources))
        chosen = list(sample_pairs(_not_blank(sources), count, pairs))
        if not chosen:
            raise InputError(f"{sources[0].source}: no sentence pairs to learn from; give other text")
        encoded = zip(
            vocabularies.source.encode_many([pair[0] for pair in chosen]),
            vocabularies.target.encode_many([pair[1] for pair in chosen]),
            strict=True,
        )
        kept = [pair for pair in encoded if max(map(len, pair)) <= data.max_length]
        if not kept:
            raise InputError(
                f"{sources[0].source}: no sentence pair of at most {data.max_length} tokens on each side "
                "(data.max_length); give text with shorter sentences"
            )
        say(f"learning from {len(kept):,} pairs")
        sizes = vocabularies.source.size, vocabularies.target.size
        table = torch.from_numpy(learn_lexicon(kept, sizes, top_k, iterations))
        write_lexicon(output, table, fingerprint(folder.path))
    notice(f"learnt the translations of {int((table[:, 0] > 0).sum()):,} words from {len(kept):,} pairs")
    print(printable(output))


def _not_blank(corpora: list[Corpus]) -> Iterator[tuple[str, str]]:
    """Yields the pairs in which neither side is blank."""
    for source, target in chain.from_iterable(map(read_pairs, corpora)):
        if source.strip() and target.strip():
            yield source, target
