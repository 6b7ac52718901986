"""``econmt lexicon``: learns a lexicon of word translations for ``translate --restrict-lexicon``."""

from __future__ import annotations

from pathlib import Path

from econmt.checkpoint.folder import ModelFolder
from econmt.config import limits
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.data.text.corpus import find_corpus, search_path
from econmt.decoding.streams import check_not_read
from econmt.errors import printable
from econmt.export.lexicon import PAIRS, make_lexicon
from econmt.export.model_folder import recipe_of
from econmt.options.option_groups import option
from econmt.options.shared_options import DataDirOption, ModelOption, check_not_of_model, check_writable


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
        PAIRS, help="Maximum number of sentence pairs, drawn evenly from the text.", min=1, max=limits.LINES
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
    search = search_path(None, data_dir)
    named = data.train if corpora is None else [str(corpus) for corpus in corpora]
    sources = [find_corpus(prefix, data.source, data.target, search, True) for prefix in named]
    check_not_read(output, [path for corpus in sources for path in corpus.files])
    with status_line() as say:
        learnt = make_lexicon(
            folder.path, output, sources, top_k=top_k, iterations=iterations, pairs=pairs, say=say
        )
    notice(f"learnt the translations of {learnt.words:,} words from {learnt.pairs:,} pairs")
    print(printable(output))
