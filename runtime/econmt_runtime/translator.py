"""Translation of lines of text with a folder or file written by ``econmt export --runtime``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt_runtime import library
from econmt_runtime.archive import unpacked
from econmt_runtime.arrays import read_arrays
from econmt_runtime.checks import check_files, read_config
from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.library import Ids
from econmt_runtime.model import RuntimeModel
from econmt_runtime.search import Options, RuntimeHypothesis, beam_search, output_limits
from econmt_runtime.shapes import check_shapes
from econmt_runtime.text import BOS, EOS, PAD, has_words, load_vocabularies, one_line

MODEL_FILE, ARRAYS_FILE = "model.json", "arrays.safetensors"

_FEWEST_ROWS, _MOST_ROWS, _POSITIONS = 48, 100, 2000
"""Hypotheses that grow together: at least and at most, and between them as many as have so many source positions.

With more, intermediate results leave the CPU's caches.
"""

_SURROGATE = re.compile("[\ud800-\udfff]")

_CHARACTERS_A_TOKEN = 50
"""Characters per token of the longest source; longer lines are cut before tokenization."""

_NAMED_LINES = 3
"""Lines longer than those of the training text that warnings name; the others are counted."""


class Entry(NamedTuple):
    """One translation: its text, its score, and its log-probability."""

    text: str
    score: float
    log_probability: float


class RuntimeTranslation(NamedTuple):
    """Result for one line: the fields of its best translation, and the n best as :class:`Entry`, best first."""

    text: str
    score: float
    log_probability: float
    nbest: tuple[Entry, ...] = ()


class RuntimeTranslator:
    """Translator of lines of text with one model.

    Args:
        folder: Folder or file written by ``econmt export --runtime``.
        beam_size: Number of hypotheses per sentence; None for the recipe's value.
        shortlist: Number of lexicon translations per source word that a translation may use, if the folder has a
            lexicon; None for all, 0 to ignore the lexicon.
        threads: Number of batches translated in parallel.
        nbest_size: Number of translations per line, at most the beam size.
        warn: Called with one line of text about a source that is too long.

    Raises:
        RuntimeInputError: If a file or an argument is invalid; the message names it.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        beam_size: int | None = None,
        shortlist: int | None = None,
        threads: int = 1,
        nbest_size: int = 1,
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.folder = Path(folder)
        self._threads, self._warn = threads, warn
        with unpacked(self.folder) as files:
            self._open(files, beam_size, shortlist, nbest_size)

    def _open(self, folder: Path, beam_size: int | None, shortlist: int | None, nbest_size: int) -> None:
        """Reads and checks the files of a folder, and the options; see the class."""
        self.config = read_config(folder / MODEL_FILE)
        check_files(folder, self.config["files"])
        decoding = {**self.config["decoding"], "nbest_size": nbest_size}
        if beam_size is not None:
            decoding["beam_size"] = beam_size
        self.options = Options(*(decoding[name] for name in Options._fields))
        if self.options.beam_size not in range(1, library.MOST_WORDS + 1):
            raise RuntimeInputError(
                f"beam size {self.options.beam_size}: use a value from 1 to {library.MOST_WORDS}"
            )
        if nbest_size not in range(1, self.options.beam_size + 1):
            raise RuntimeInputError(
                f"n-best size {nbest_size}: use a value from 1 to the beam size, {self.options.beam_size}"
            )
        if shortlist is not None and shortlist < 0:
            raise RuntimeInputError(f"shortlist {shortlist}: use 0, to ignore the lexicon, or more")
        if self._threads < 1:
            raise RuntimeInputError(f"threads {self._threads}: use 1 or more")
        # Modules that run from the same file have no library beside them: it was unpacked, too.
        from_this_file = os.path.realpath(Path(__file__).parents[1]) == os.path.realpath(self.folder)
        library.start(folder / "econmt_runtime" if from_this_file else None)
        self._source, self._target = load_vocabularies(folder, self.config["vocabulary_files"])
        arrays = read_arrays(folder / ARRAYS_FILE, self.config["arrays"])
        try:
            check_shapes(arrays, self.config, self._source.size, self._target.size)
            self._model = RuntimeModel(arrays, self.config)
        except (KeyError, TypeError, ValueError) as error:
            raise RuntimeInputError(
                f"{folder / ARRAYS_FILE}: does not fit {MODEL_FILE} ({error}); export the model again"
            ) from error
        self._size = len(arrays["output.bias"])
        self._lexicon: Ids | None = None
        if "lexicon" in arrays and shortlist != 0:
            self._lexicon = arrays["lexicon"][:, :shortlist].astype(np.int64)
        elif shortlist:
            raise RuntimeInputError(
                f"{self.folder}: has no lexicon; export the model with a lexicon, or use no shortlist"
            )

    def translate(self, lines: Sequence[str], first: int = 1) -> list[RuntimeTranslation]:
        """Translates lines of raw text, one sentence per line; a line without words is copied.

        Args:
            lines: Lines to translate.
            first: Number of the first line, for messages.

        Returns:
            One translation per line.

        Raises:
            RuntimeInputError: If the lines are not a list of text that UTF-8 can write, or the model gives no finite
                probability to any translation of a line.
        """
        is_list = isinstance(lines, Sequence) and not isinstance(lines, str)
        if not is_list or not all(isinstance(line, str) for line in lines):
            raise RuntimeInputError("translate expects a list of lines of text, as translate(['A dog.'])")
        for number, line in enumerate(lines, first):
            if found := _SURROGATE.search(line):
                raise RuntimeInputError(
                    f"line {number}: the character U+{ord(found[0]):04X} is not allowed in text; remove it"
                )
        sources = self._encode(lines, first)
        order = sorted((i for i, ids in enumerate(sources) if ids), key=lambda i: -len(sources[i]))
        batches = list(self._batches(order, sources))
        copies = [Entry(one_line(line), 0.0, 0.0) for line in lines]
        results = [RuntimeTranslation(*copy, (copy,) if copy.text else ()) for copy in copies]
        if self._threads > 1 and len(batches) > 1:
            from concurrent.futures import ThreadPoolExecutor  # a tenth of the start-up time

            with ThreadPoolExecutor(self._threads) as pool:
                done = list(pool.map(lambda batch: self._search([sources[i] for i in batch]), batches))
        else:
            done = [self._search([sources[i] for i in batch]) for batch in batches]
        for batch, batch_hypotheses in zip(batches, done, strict=True):
            for index, hypotheses in zip(batch, batch_hypotheses, strict=True):
                if not hypotheses:
                    raise RuntimeInputError(
                        f"line {first + index}: the model gives no finite probability to any translation"
                    )
                entries = [
                    Entry(one_line(self._target.decode(ids)), score, log_probability)
                    for ids, score, log_probability in hypotheses
                ]
                results[index] = RuntimeTranslation(*entries[0], tuple(entries))
        return results

    def _batches(self, order: Sequence[int], sources: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Divides the numbers of sentences, longest first, into batches."""
        at = 0
        while at < len(order):
            rows = min(_MOST_ROWS, max(_FEWEST_ROWS, _POSITIONS // len(sources[order[at]])))
            size = max(1, rows // self.options.beam_size)
            yield order[at : at + size]
            at += size

    def _encode(self, lines: Sequence[str], first: int) -> list[list[int]]:
        """Returns the ids of lines, cut to the limit; warns of lines that are too long."""
        cap, usual, longer = self.config["max_input_length"], self.config["max_length"], 0
        characters, sources = cap * _CHARACTERS_A_TOKEN, []
        for number, line in enumerate(lines, first):
            ids = self._source.encode(line[:characters]) if has_words(line) else []
            if ids and (len(ids) > cap or len(line) > characters):
                self._warn(
                    f"line {number}: more than the {cap:,} tokens that a source may have; only the beginning is "
                    "translated"
                )
            elif len(ids) > usual:
                longer += 1
                if longer <= _NAMED_LINES:
                    self._warn(
                        f"line {number}: {len(ids)} source tokens, more than the {usual} that the model was trained "
                        "on; the translation may be poor or incomplete"
                    )
            sources.append(ids[:cap])
        if longer > _NAMED_LINES:
            self._warn(f"further lines of more than {usual} source tokens: {longer - _NAMED_LINES:,}")
        return sources

    def _search(self, sources: Sequence[Sequence[int]]) -> list[list[RuntimeHypothesis]]:
        lengths = np.array([len(ids) for ids in sources])
        source = np.full((len(sources), int(lengths.max()) + 1), PAD)
        for row, ids in enumerate(sources):
            source[row, : len(ids) + 1] = [*ids, EOS]
        padding = np.arange(source.shape[1]) > lengths[:, None]
        limits = output_limits(lengths, self.options.max_output_factor, self.config["max_length"])
        return beam_search(self._model, source, padding, limits, self.options, self._allowed(source))

    def _allowed(self, source: Ids) -> npt.NDArray[np.bool_] | None:
        """Returns the words (B, V) that each of the sentences (B, S) may use; None for all words."""
        if self._lexicon is None:
            return None
        allowed = np.zeros((len(source), self._size), np.bool_)
        source = np.where(source == PAD, EOS, source)  # which every sentence has
        np.put_along_axis(allowed, self._lexicon[source].reshape(len(source), -1), True, 1)
        allowed[:, self._lexicon[BOS]] = True
        if self.config["joint"]:
            np.put_along_axis(allowed, source, True, 1)
        allowed[:, :4] = True
        return allowed


def load(folder: Path | str, **options: Any) -> RuntimeTranslator:
    """Loads a folder or file; ``options`` are the keyword arguments of :class:`RuntimeTranslator`."""
    return RuntimeTranslator(folder, **options)
