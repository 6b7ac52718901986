"""From lines of text to lines of text, with what ``econmt export --runtime`` wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt_runtime import library
from econmt_runtime.arrays import read_arrays
from econmt_runtime.checks import check_files, read_config
from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.library import Ids
from econmt_runtime.model import RuntimeModel
from econmt_runtime.search import Options, RuntimeHypothesis, beam_search, output_limits
from econmt_runtime.shapes import ShapeError, check_shapes
from econmt_runtime.text import BOS, EOS, PAD, load_vocabularies, one_line

MODEL_FILE, ARRAYS_FILE = "model.json", "arrays.safetensors"

BATCH_SIZE = 24
"""Sentences translated together: few enough for their work to stay in caches."""


_CHARACTERS_A_TOKEN = 50
"""Lines with more than a source of the most tokens can have are cut before they are made tokens of."""


class Entry(NamedTuple):
    """One translation: its text, its score, and the log-probability that it comes from."""

    text: str
    score: float
    log_probability: float


class Translation(NamedTuple):
    """What became of a line: the best translation as :class:`Entry` has it, and the n best, best first."""

    text: str
    score: float
    log_probability: float
    nbest: tuple[Entry, ...] = ()


class Translator:
    """Translates lines with one model.

    Args:
        folder: what ``econmt export --runtime`` wrote.
        beam_size: hypotheses kept; None: the recipe's.
        shortlist: how many translations of each source word the lexicon of the folder gives, if it has one; None: all,
            0: the lexicon is left aside.
        threads: batches that are translated at the same time.
        nbest_size: translations of a line, at most the beam size.
        warn: takes one line about a source that is too long.

    Raises:
        RuntimeInputError: naming the file or the argument.
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
        self.config = read_config(self.folder / MODEL_FILE)
        check_files(self.folder, self.config["files"])
        decoding = {**self.config["decoding"], "nbest_size": nbest_size}
        if beam_size is not None:
            decoding["beam_size"] = beam_size
        self.options = Options(*(decoding[name] for name in Options._fields))
        if not 1 <= self.options.beam_size <= library.MOST_WORDS:
            raise RuntimeInputError(f"beam size {self.options.beam_size}: give 1 to {library.MOST_WORDS}")
        if not 1 <= nbest_size <= self.options.beam_size:
            raise RuntimeInputError(
                f"n-best size {nbest_size}: give 1 to the beam size, {self.options.beam_size}"
            )
        if shortlist is not None and shortlist < 0:
            raise RuntimeInputError(f"shortlist {shortlist}: give 0, for none, or more")
        if threads < 1:
            raise RuntimeInputError(f"threads {threads}: give 1 or more")
        library.start()
        self._source, self._target = load_vocabularies(self.folder, self.config["vocabulary_files"])
        arrays = read_arrays(self.folder / ARRAYS_FILE, self.config["arrays"])
        try:
            check_shapes(arrays, self.config, self._source.size, self._target.size)
            self._model = RuntimeModel(arrays, self.config)
        except ShapeError as error:
            raise RuntimeInputError(
                f"{self.folder / ARRAYS_FILE}: {error}, by {MODEL_FILE}; export it again"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise RuntimeInputError(
                f"{self.folder / ARRAYS_FILE}: has not what {MODEL_FILE} says ({error}); export it again"
            ) from error
        self._size = len(arrays["output.bias"])
        self._lexicon: Ids | None = None
        if "lexicon" in arrays and shortlist != 0:
            self._lexicon = arrays["lexicon"][:, :shortlist].astype(np.int64)
        elif shortlist:
            raise RuntimeInputError(
                f"{self.folder}: holds no lexicon; export it with one, or ask for no shortlist"
            )
        self._threads, self._warn = threads, warn

    def translate(self, lines: Sequence[str], first: int = 1) -> list[Translation]:
        """Translate lines of raw text, one sentence a line; a blank one gives an empty one.

        Args:
            lines: the lines. first: the number of the first of them in messages.

        Raises:
            RuntimeInputError: the model gives no finite probability to any translation of a line.
        """
        sources = [self._encode(line, number) for number, line in enumerate(lines, first)]
        order = sorted((i for i, ids in enumerate(sources) if ids), key=lambda i: -len(sources[i]))
        batches = [order[at : at + BATCH_SIZE] for at in range(0, len(order), BATCH_SIZE)]
        results = [Translation("", 0.0, 0.0)] * len(lines)
        if self._threads > 1 and len(batches) > 1:
            from concurrent.futures import ThreadPoolExecutor  # it takes a tenth of the time of starting

            with ThreadPoolExecutor(self._threads) as pool:
                done = list(pool.map(lambda batch: self._search([sources[i] for i in batch]), batches))
        else:
            done = [self._search([sources[i] for i in batch]) for batch in batches]
        for batch, found in zip(batches, done, strict=True):
            for index, hypotheses in zip(batch, found, strict=True):
                if not hypotheses:
                    raise RuntimeInputError(
                        f"line {first + index}: the model gives no finite probability to any translation"
                    )
                entries = [
                    Entry(one_line(self._target.decode(each.ids)), each.score, each.log_probability)
                    for each in hypotheses
                ]
                results[index] = Translation(*entries[0], tuple(entries))
        return results

    def _encode(self, line: str, number: int) -> list[int]:
        """The ids of a line, cut where it is too long, which is warned of."""
        most, usual = self.config["max_input_length"], self.config["max_length"]
        characters = most * _CHARACTERS_A_TOKEN
        ids = self._source.encode(line[:characters]) if line.strip() else []
        if len(ids) > most or len(line) > characters:
            self._warn(
                f"line {number}: more than the {most:,} tokens that a source may have; only the beginning is translated"
            )
        elif len(ids) > usual:
            self._warn(
                f"line {number}: {len(ids)} source tokens, more than the {usual} that the model was trained on; the "
                "translation may be poor or incomplete"
            )
        return ids[:most]

    def _search(self, sources: Sequence[Sequence[int]]) -> list[list[RuntimeHypothesis]]:
        lengths = np.array([len(ids) for ids in sources])
        source = np.full((len(sources), int(lengths.max()) + 1), PAD)
        for row, ids in enumerate(sources):
            source[row, : len(ids) + 1] = [*ids, EOS]
        padding = np.arange(source.shape[1]) > lengths[:, None]
        limits = output_limits(lengths, self.options.max_output_factor, self.config["max_length"])
        return beam_search(self._model, source, padding, limits, self.options, self._allowed(source))

    def _allowed(self, source: Ids) -> npt.NDArray[np.bool_] | None:
        """(B, V) the words that each of the sentences (B, S) may have; None: all."""
        if self._lexicon is None:
            return None
        found = np.zeros((len(source), self._size), np.bool_)
        np.put_along_axis(found, self._lexicon[source].reshape(len(source), -1), True, 1)
        found[:, self._lexicon[BOS]] = True
        if self.config["joint"]:
            np.put_along_axis(found, source, True, 1)
        found[:, :4] = True
        return found


def load(folder: Path | str, **options: Any) -> Translator:
    """A :class:`Translator`; ``options`` are its keyword arguments."""
    return Translator(folder, **options)
