"""Which training pairs are left out before a vocabulary is learnt, and the report of what was left out and why."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from econmt.config.recipe import Data, Recipe, TextData
from econmt.data.progress_bars import told
from econmt.data.text.corpus import Corpus, read_pairs
from econmt.data.text.subwords import split_words
from econmt.errors import InputError

KEPT = 0
REASONS = ("too_long", "empty", "few_words", "many_words", "ratio", "identical", "language", "duplicate")
"""Why a pair is left out: counts of a store's statistics. A code of :class:`Selection` is a place here, from 1."""

REPORT_FILE = "left-out.txt"
EXAMPLES = 3
"""Of each reason, in the report."""
_WIDTH = 80
_NO_KEY = 0
"""Of a pair with an empty side, which is left out when the store is written and takes no other's place."""

Codes = npt.NDArray[np.uint8]
Classify = Callable[[str], tuple[str, float]]
"""The language of a text and its probability."""


def words_of(reason: str, data: Data) -> str:
    """A reason as a person reads it."""
    filters = data.filters
    what = {"pairs": "the pair", "source": "the source", "target": "the target"}
    return {
        "too_long": f"longer than data.max_length {data.max_length} tokens on a side",
        "empty": "with an empty side",
        "few_words": f"with fewer than {filters.min_words} words on a side",
        "many_words": f"with more than {filters.max_words} words on a side",
        "ratio": f"with one side more than {filters.max_length_ratio or 0:g} times as long as the other",
        "identical": "with the same text on both sides",
        "language": "with a side in another language",
        "duplicate": f"where {what.get(filters.duplicates, 'it')} came before",
    }[reason]


def left_out(recipe: Recipe, statistics: Mapping[str, Mapping[str, int]]) -> str:
    """Says how many training pairs were filtered out, and why; empty if none was.

    Args:
        recipe: Recipe of the run.
        statistics: Counts by split, as prepared data has them.
    """
    if isinstance(recipe.data, TextData):
        return ""
    counts = statistics["train"]
    dropped = {reason: counts.get(reason, 0) for reason in REASONS}
    parts = [f"{number:,} {words_of(reason, recipe.data)}" for reason, number in dropped.items() if number]
    return (
        f"{sum(dropped.values()):,} of {counts['lines']:,} pairs are left out: {', '.join(parts)}"
        if parts
        else ""
    )


def language_classifier(languages: Iterable[str]) -> Classify:
    """py3langid's, for all the languages that it knows.

    Raises:
        InputError: it is not installed, or does not know one of ``languages``.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise InputError(
            "data.filters.language_certainty: languages are told by py3langid, which is not installed; pip install "
            "py3langid, or leave the key out"
        ) from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    for language in languages:
        if language not in identifier.labels:
            raise InputError(
                f"data.filters.language_certainty: py3langid knows no language {language!r}; it knows "
                f"{', '.join(sorted(identifier.labels))}"
            )

    def classify(text: str) -> tuple[str, float]:
        language, probability = identifier.classify(text)
        return str(language), float(probability)

    return classify


class Selection:
    """For each training pair why it is left out, a byte each.

    One pass over the text. Of what must not come twice 8 bytes a pair are kept for the time of the pass, so that two
    different texts are taken for the same once in 2**64 comparisons.

    Args:
        data: the recipe's section. corpora: the training text, as ``data.train`` has it. more: told of pairs read.

    Raises:
        InputError: as :func:`econmt.data.text.corpus.read_pairs` and :func:`language_classifier`.
    """

    def __init__(
        self, data: Data, corpora: Sequence[Corpus], more: Callable[[int], None] = lambda _: None
    ) -> None:
        self._data, self._filters = data, data.filters
        self._expected = tuple(
            side.lower().replace("_", "-").partition("-")[0] for side in (data.source, data.target)
        )
        self._classify: Classify | None = None
        if self._filters.language_certainty is not None:
            self._classify = language_classifier(self._expected)
        codes = [self._pass(told(read_pairs(corpus), more)) for corpus in corpora]
        self.codes = [np.frombuffer(own, dtype=np.uint8).copy() for own, _ in codes]
        """(N,) of each corpus: 0, or a place in :data:`REASONS` from 1."""
        if self._filters.duplicates != "keep":
            self._mark_duplicates([np.frombuffer(keys, dtype=np.uint64) for _, keys in codes])

    def _pass(self, pairs: Iterable[tuple[str, str]]) -> tuple[bytearray, array[int]]:
        codes, keys = bytearray(), array("Q")
        by = self._filters.duplicates
        for source, target in pairs:
            pair = " ".join(split_words(source)), " ".join(split_words(target))
            reason = self._reason(*pair) if all(pair) else None
            codes.append(KEPT if reason is None else REASONS.index(reason) + 1)
            if by != "keep":
                text = {"pairs": "\n".join(pair), "source": pair[0], "target": pair[1]}[by]
                keys.append(_key(text) if all(pair) else _NO_KEY)
        return codes, keys

    def _reason(self, source: str, target: str) -> str | None:
        filters = self._filters
        words = sorted((len(split_words(source)), len(split_words(target))))
        characters = sorted((len(source), len(target)))
        if words[0] < filters.min_words:
            return "few_words"
        if filters.max_words is not None and words[1] > filters.max_words:
            return "many_words"
        if filters.max_length_ratio is not None and characters[1] > filters.max_length_ratio * characters[0]:
            return "ratio"
        if filters.identical == "drop" and source == target:
            return "identical"
        if self._classify is not None and filters.language_certainty is not None:
            for text, expected in zip((source, target), self._expected, strict=True):
                language, probability = self._classify(text)
                if language != expected and probability >= filters.language_certainty:
                    return "language"
        return None

    def _mark_duplicates(self, keys: Sequence[npt.NDArray[np.uint64]]) -> None:
        """Mark all but the first of what is not left out for another reason, too many tokens set aside.

        Tokens are counted with a vocabulary, which is learnt from what is left here.
        """
        codes, found = np.concatenate(self.codes), np.concatenate(keys)
        kept = np.flatnonzero((codes == KEPT) & (found != _NO_KEY))
        firsts = np.unique(found[kept], return_index=True)[1]
        repeated = np.ones(len(kept), dtype=bool)
        repeated[firsts] = False
        codes[kept[repeated]] = REASONS.index("duplicate") + 1
        ends = np.cumsum([len(own) for own in self.codes])
        self.codes = np.split(codes, ends[:-1])


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class LeftOut:
    """Counts what is left out, and keeps the first examples."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._examples: dict[str, list[str]] = {reason: [] for reason in REASONS}

    def add(self, reason: str, where: str, pair: tuple[str, str]) -> None:
        """One more pair, at ``where`` as file:line."""
        self.counts[reason] += 1
        if len(self._examples[reason]) < EXAMPLES * 3:
            most = _WIDTH - 14
            place = where if len(where) <= most else "..." + where[3 - most :]
            self._examples[reason] += [place, *(_cut(text) for text in pair)]

    def write(self, folder: Path, data: Data, lines: int) -> None:
        """The report, a text file of at most 80 columns; none if nothing is left out.

        Args:
            folder: where it goes. data: the recipe's section. lines: pairs that were read.
        """
        if not any(self.counts.values()):
            return
        rows = [f"{'left out':>12}{'share':>9}  training pairs"]
        for reason, count in self.counts.items():
            if count:
                rows.append(f"{count:>12,}{100 * count / lines:>7.2f} %  {words_of(reason, data)}")
                rows += [f"{'':14}{line}" for line in self._examples[reason]]
        (folder / REPORT_FILE).write_text("\n".join(rows) + "\n", encoding="utf-8")


def _cut(text: str) -> str:
    most = _WIDTH - 18
    return "  " + (text if len(text) <= most else text[: most - 3] + "...")


def report_lines(folder: Path) -> list[str]:
    """The lines of the report of a store; none if nothing was left out."""
    path = folder / REPORT_FILE
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def no_pair_left(files: Sequence[str], counts: Mapping[str, int], data: Data) -> InputError:
    """The error of a training text of which nothing is left."""
    parts = [f"{counts['too_long']} {words_of('too_long', data)}"]
    parts += [f"{counts[reason]} {words_of(reason, data)}" for reason in REASONS[1:] if counts[reason]]
    return InputError(
        f"{', '.join(files)}: no training pair is left of {counts['lines']}: {', '.join(parts)}; raise "
        "data.max_length, mend the text or filter less of it"
    )
