"""From lines of text to lines of text, with what ``econmt export --runtime`` wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt_runtime import library
from econmt_runtime.arrays import read_arrays
from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.library import Ids
from econmt_runtime.model import Model
from econmt_runtime.search import Hypothesis, Options, beam_search, output_limits
from econmt_runtime.shapes import ShapeError, check_shapes
from econmt_runtime.text import BOS, EOS, PAD, load_vocabularies, one_line

FORMAT = "econmt-runtime-1"
MODEL_FILE, ARRAYS_FILE = "model.json", "arrays.safetensors"

BATCH_SIZE = 24
"""Sentences translated together: few enough for their work to stay in caches."""


class Translation(NamedTuple):
    """What became of a line: its text, its score, and the log-probability that it comes from."""

    text: str
    score: float
    log_probability: float


class Translator:
    """Translates lines with one model.

    Args:
        folder: what ``econmt export --runtime`` wrote.
        beam_size: hypotheses kept; None: the recipe's.
        shortlist: how many translations of each source word the lexicon of the folder gives, if it has one; None: all,
            0: the lexicon is left aside.
        threads: batches that are translated at the same time.

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
    ) -> None:
        self.folder = Path(folder)
        self.config = _read_config(self.folder / MODEL_FILE)
        decoding = self.config["decoding"]
        self.options = Options(
            decoding["beam_size"] if beam_size is None else beam_size,
            *(decoding[name] for name in Options._fields[1:]),
        )
        if not 1 <= self.options.beam_size <= library.MOST_WORDS:
            raise RuntimeInputError(f"beam size {self.options.beam_size}: give 1 to {library.MOST_WORDS}")
        if shortlist is not None and shortlist < 0:
            raise RuntimeInputError(f"shortlist {shortlist}: give 0, for none, or more")
        if threads < 1:
            raise RuntimeInputError(f"threads {threads}: give 1 or more")
        library.start()
        self._source, self._target = load_vocabularies(self.folder, self.config["vocabulary_files"])
        arrays = read_arrays(self.folder / ARRAYS_FILE)
        try:
            check_shapes(arrays, self.config)
            self._model = Model(arrays, self.config)
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
        self._threads = threads

    def translate(self, lines: Sequence[str], first: int = 1) -> list[Translation]:
        """Translate lines of raw text, one sentence a line; a blank one gives an empty one.

        Args:
            lines: the lines. first: the number of the first of them in messages.

        Raises:
            RuntimeInputError: the model gives no finite probability to any translation of a line.
        """
        most = self.config["max_input_length"]
        sources = [self._source.encode(line)[:most] if line.strip() else [] for line in lines]
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
            for index, best in zip(batch, found, strict=True):
                if best is None:
                    raise RuntimeInputError(
                        f"line {first + index}: the model gives no finite probability to any translation"
                    )
                text = one_line(self._target.decode(best.ids))
                results[index] = Translation(text, best.score, best.log_probability)
        return results

    def _search(self, sources: Sequence[Sequence[int]]) -> list[Hypothesis | None]:
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


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeInputError(f"{path}: not what econmt export --runtime writes ({error})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RuntimeInputError(f"{path}: not of format {FORMAT}; export the model again with this version")
    return found


def load(folder: Path | str, **options: Any) -> Translator:
    """A :class:`Translator`; ``options`` are its keyword arguments."""
    return Translator(folder, **options)
