"""Filters that leave out training pairs before vocabularies are learnt, and the report of what was left out."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from econmt.config.recipe import Data, Recipe, TextData
from econmt.data.progress_bars import counted
from econmt.data.text.corpus import Corpus, read_pairs
from econmt.data.text.vocabulary import split_words
from econmt.errors import InputError

KEPT = 0
REASONS = (
    "too_long",
    "empty",
    "few_words",
    "many_words",
    "ratio",
    "repeats",
    "identical",
    "language",
    "duplicate",
)
"""Reasons for leaving out a pair, keys of a store's statistics. A code of :class:`Selection` is an index from 1."""

REPORT_FILE = "left-out.txt"
EXAMPLES = 3
"""Number of examples of each reason in the report."""
_WIDTH = 80
_LONGEST_REPEATED = 8
"""Largest number of words that are repeated together."""
_LONGEST_WORDS = 20
"""Mean length, in characters, of the longest words of languages that put spaces between them."""
_NO_KEY = 0
"""Duplicate key of pairs with an empty side, which are not compared; they are left out when the store is written."""

Codes = npt.NDArray[np.uint8]
Classify = Callable[[str], tuple[str, float]]
"""Function from a text to its language and the probability of that."""


def words_of(reason: str, data: Data) -> str:
    """Describes a reason in words."""
    filters = data.filters
    repeated_part = {"pairs": "the pair", "source": "the source", "target": "the target"}
    return {
        "too_long": f"longer than data.max_length {data.max_length} tokens on a side",
        "empty": "with an empty side",
        "few_words": f"with fewer than {filters.min_words} words on a side",
        "many_words": f"with more than {filters.max_words} words on a side",
        "ratio": f"with one side more than {filters.max_length_ratio or 0:g} times as long as the other",
        "repeats": f"with the same words more than {filters.max_repeats} times in a row",
        "identical": "with the same text on both sides",
        "language": "with a side in another language",
        "duplicate": f"where {repeated_part.get(filters.duplicates, 'it')} came before",
    }[reason]


def left_out(recipe: Recipe, statistics: Mapping[str, Mapping[str, int]]) -> str:
    """Returns a sentence on the training pairs that were left out and why; empty if none was.

    The statistics are those of :class:`~econmt.data.batching.store.PreparedData`.
    """
    counts = statistics["train"]
    dropped = {reason: counts.get(reason, 0) for reason in REASONS}
    if isinstance(recipe.data, TextData) or not any(dropped.values()):
        return ""
    parts = [f"{number:,} {words_of(reason, recipe.data)}" for reason, number in dropped.items() if number]
    return f"{sum(dropped.values()):,} of {counts['lines']:,} pairs are left out: {', '.join(parts)}"


def language_classifier(languages: Iterable[str]) -> Classify:
    """Returns py3langid's classifier over all languages that it knows; raises InputError for others and without it."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise InputError(
            "data.filters.language_certainty needs py3langid, which is not installed; run pip install py3langid, or "
            "remove the key"
        ) from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    for language in languages:
        if language not in identifier.labels:
            raise InputError(
                f"data.filters.language_certainty: py3langid does not know the language {language!r}; it knows "
                f"{', '.join(sorted(identifier.labels))}"
            )

    def classify(text: str) -> tuple[str, float]:
        language, probability = identifier.classify(text)
        return str(language), float(probability)

    return classify


class Selection:
    """Filter decisions for all training pairs, one byte each, made in one pass over the text.

    Duplicates are found by hashes of 8 bytes per pair, so that different texts are confused once in 2**64 comparisons.
    The corpora are those of ``data.train``; ``more`` is called with numbers of pairs read.
    """

    def __init__(
        self, data: Data, corpora: Sequence[Corpus], more: Callable[[int], None] = lambda _: None
    ) -> None:
        self._data, self._filters = data, data.filters
        languages = data.source, data.target
        self._expected = [name.lower().replace("_", "-").partition("-")[0] for name in languages]
        self._classify: Classify | None = None
        if self._filters.language_certainty is not None:
            self._classify = language_classifier(self._expected)
        codes = [self._pass(counted(read_pairs(corpus), more)) for corpus in corpora]
        self.codes = [np.frombuffer(corpus_codes, dtype=np.uint8).copy() for corpus_codes, _ in codes]
        """Codes of each corpus, (N,): 0 if the pair is kept, else an index into :data:`REASONS` from 1."""
        if self._filters.duplicates != "keep":
            self._mark_duplicates([np.frombuffer(keys, dtype=np.uint64) for _, keys in codes])

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of pairs left out, by reason, and of all ``lines``."""
        counts = sum(np.bincount(codes, minlength=len(REASONS) + 1) for codes in self.codes)
        return dict(
            zip(("lines", *REASONS), [int(np.sum(counts)), *np.ravel(counts).tolist()[1:]], strict=True)
        )

    def _pass(self, pairs: Iterable[tuple[str, str]]) -> tuple[bytearray, array[int]]:
        codes, keys = bytearray(), array("Q")
        by = self._filters.duplicates
        for source, target in pairs:
            pair = " ".join(split_words(source)), " ".join(split_words(target))
            reason = self._reason(*pair) if all(pair) else None
            codes.append(KEPT if reason is None else REASONS.index(reason) + 1)
            if by != "keep":
                text = {"pairs": "\n".join(pair), "source": pair[0], "target": pair[1]}[by]
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                keys.append(int.from_bytes(digest, "little") if all(pair) else _NO_KEY)
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
        if filters.max_repeats is not None and max(map(repeats, (source, target))) > filters.max_repeats:
            return "repeats"
        if filters.identical == "drop" and source == target:
            return "identical"
        if self._classify is not None and filters.language_certainty is not None:
            for text, expected in zip((source, target), self._expected, strict=True):
                language, probability = self._classify(text)
                if language != expected and probability >= filters.language_certainty:
                    return "language"
        return None

    def _mark_duplicates(self, keys: Sequence[npt.NDArray[np.uint64]]) -> None:
        """Marks all but the first of equal pairs among those that are kept so far.

        Pairs with too many tokens still count as kept: tokens are counted with a vocabulary learnt from these pairs.
        """
        codes, all_keys = np.concatenate(self.codes), np.concatenate(keys)
        kept = np.flatnonzero((codes == KEPT) & (all_keys != _NO_KEY))
        firsts = np.unique(all_keys[kept], return_index=True)[1]
        repeated = np.ones(len(kept), dtype=bool)
        repeated[firsts] = False
        codes[kept[repeated]] = REASONS.index("duplicate") + 1
        ends = np.cumsum([len(corpus_codes) for corpus_codes in self.codes])
        self.codes = np.split(codes, ends[:-1])


def repeats(text: str) -> int:
    """Returns how many times in a row the most repeated words, one to eight of them with a letter, stand in a text.

    Text with so few spaces that it is of a language without them is read by its characters.
    """
    units = split_words(text)
    if len(text) > _LONGEST_WORDS * len(units):
        units = list(text)
    most = 1
    for period in range(1, min(_LONGEST_REPEATED, len(units) // 2) + 1):
        run = 0
        for index in range(period, len(units)):
            run = run + 1 if units[index] == units[index - period] else 0
            times = run // period + 1
            if times > most and any(map(str.isalpha, "".join(units[index - period : index]))):
                most = times
    return most


class LeftOut:
    """Counts of left-out pairs by reason, with the first examples of each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._examples: dict[str, list[str]] = {reason: [] for reason in REASONS}

    def add(self, reason: str, where: str, pair: tuple[str, str]) -> None:
        """Adds a pair; ``where`` is its file:line."""
        self.counts[reason] += 1
        if len(self._examples[reason]) < EXAMPLES * 3:
            width = _WIDTH - 14
            location = where if len(where) <= width else "..." + where[3 - width :]
            self._examples[reason] += [location, *(_cut(text) for text in pair)]

    def write(self, folder: Path, data: Data, lines: int) -> None:
        """Writes the report on ``lines`` pairs, a text file of at most 80 columns; nothing if no pair is left out."""
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
    """Returns the lines of a store's report; empty if nothing was left out."""
    path = folder / REPORT_FILE
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def no_pair_left(files: Sequence[str], counts: Mapping[str, int], data: Data) -> InputError:
    """Returns the error for a training text of which no pair is left."""
    parts = [f"{counts['too_long']} {words_of('too_long', data)}"]
    parts += [f"{counts[reason]} {words_of(reason, data)}" for reason in REASONS[1:] if counts[reason]]
    return InputError(
        f"{', '.join(files)}: no training pair is left of {counts['lines']}: {', '.join(parts)}; raise "
        "data.max_length, correct the text or relax data.filters"
    )
