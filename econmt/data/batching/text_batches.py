"""Batches of one long text for truncated backpropagation through time.

The text is cut into B rows of equal length. A batch is a window of the next ``bptt`` tokens of every row, each
predicted from the tokens before it. The next batch is the following window, and the model continues with the state at
the end of the previous one: ``carries`` tells whether a row does (not at the start of an epoch), ``rows`` which state.

The first token is predicted from an end of line, like the first token of every line. Fewer than B tokens at the end of
the text, which do not fill all rows, are left out in training but not in evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from econmt.data.batching.batch import AnyBatch, Batches, BatchShape
from econmt.data.batching.token_store import TokenStore
from econmt.data.text.vocabulary import EOS, PAD
from econmt.errors import InputError

JITTER = 5
"""Standard deviation of the length of jittered windows in tokens; their lengths are multiples of it (few shapes)."""

_MOST_JITTER = 20
"""Maximum number of tokens by which a jittered window exceeds ``bptt``."""

_HALVED = 0.05
"""Fraction of jittered windows whose mean length is half of ``bptt`` (Merity et al., 2018, section 4.1)."""


@dataclass(frozen=True)
class TextBatch(AnyBatch):
    """Window of a text: B rows of T tokens, all tensors int64.

    With jitter, ``rate`` is T / ``bptt``, so that short windows change the parameters less.
    """

    inputs: torch.Tensor
    """Input tokens, (B, T)."""
    targets: torch.Tensor
    """Tokens to predict, the next token of each input, (B, T); padding where a row has ended."""
    rows: torch.Tensor
    """Number of the carried state of each row, from 1, (B,); 0 for padding rows."""
    carries: torch.Tensor
    """1 if a row continues with its state, 0 if it starts without one, (B,)."""

    @property
    def positions(self) -> tuple[int, int]:
        """Padded numbers of source and target positions, 1 and T; there is no source."""
        return 1, self.inputs.shape[1]

    @property
    def size_text(self) -> str:
        """Size of the batch, as "20 rows of 35 tokens"."""
        return f"{len(self.indices)} rows of {self.inputs.shape[1]} tokens"

    def renumbered(self) -> TextBatch:
        """Renumbers the carried states by the rows of this batch, from 1."""
        return replace(self, rows=torch.arange(1, len(self.rows) + 1))

    def part(self, rows: slice) -> TextBatch:
        """Returns some rows."""
        tensors = self._tensors(rows)
        count = int((tensors["targets"] != PAD).sum())
        return TextBatch(**tensors, target_tokens=count, rate=self.rate)


class TextRows:
    """Text cut into rows of tokens, read on demand.

    Args:
        store: token store of its lines, each followed by an end of line.
        rows: number of rows, B.
        keep_all: if True, keeps all tokens, with a shorter last row; else leaves out fewer than B tokens at the end.
    """

    def __init__(self, store: TokenStore, rows: int, *, keep_all: bool = False) -> None:
        self.store = store
        self.rows = rows
        self.length = -(-store.total_tokens // rows) if keep_all else store.total_tokens // rows
        """Number of tokens of a row."""

    def window(self, first: int, count: int, rows: range, rate: float = 1.0, *, start: int = 0) -> TextBatch:
        """Returns the window of tokens ``first`` to ``first + count`` of some rows.

        Args:
            first: offset in each row; below 0 for context tokens before a row, which are not predicted.
            count: number of tokens of each row. rows: indices of the rows. rate: factor of the learning rate.
            start: value of ``first`` at which rows begin without a state.
        """
        ids = np.full((len(rows), count + 1), PAD, dtype=np.int64)
        positions = np.array([row * self.length + first for row in rows], dtype=np.int64)
        for row, position in zip(ids, positions.tolist(), strict=True):
            if position < 0:
                continue
            begin, end = max(position - 1, 0), min(position + count, self.store.total_tokens)
            row_tokens = self.store.tokens(begin, max(0, end - begin))
            row[begin - position + 1 :][: len(row_tokens)] = row_tokens
            if position == 0:
                row[0] = EOS
        targets = np.full_like(ids[:, 1:], PAD) if first < 0 else ids[:, 1:].copy()
        carries = (positions > 0) & (first > start)
        return TextBatch(
            indices=torch.from_numpy(self.store.pairs_at(np.maximum(positions, 0)).astype(np.int64)),
            inputs=torch.from_numpy(ids[:, :-1].copy()),
            targets=torch.from_numpy(targets),
            rows=torch.tensor(rows, dtype=torch.int64) + 1,
            carries=torch.from_numpy(carries.astype(np.int64)),
            target_tokens=int((targets != PAD).sum()),
            rate=rate,
        )


class TextBatches(Batches[TextBatch]):
    """Endless stream of windows over a text.

    Args:
        store: token store of the text, which has no fewer tokens than rows.
        rows: number of rows, B.
        bptt: number of tokens of a window in each row.
        jitter: True draws the length of each window at random around ``bptt``. seed: seed of the lengths.
    """

    def __init__(
        self, store: TokenStore, rows: int, bptt: int, *, jitter: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        if store.total_tokens < rows:
            raise InputError(
                f"the training text has {store.total_tokens:,} tokens, fewer than training.batch.size {rows}; give "
                "more text or fewer rows"
            )
        self._text = TextRows(store, rows)
        self._bptt, self._jitter, self._seed = bptt, jitter, seed
        self._rows = range(rows)
        self._cut: tuple[int, list[int]] = (-1, [])

    @property
    def _begins(self) -> list[int]:
        """Offsets at which the windows of the current epoch begin, and the end."""
        if self._cut[0] != self.epoch:
            self._cut = self.epoch, self._begins_of_epoch()
        return self._cut[1]

    def _begins_of_epoch(self) -> list[int]:
        length = self._text.length
        if not self._jitter:
            return [*range(0, length, self._bptt), length]
        draw = np.random.Generator(np.random.PCG64([self._seed, self.epoch]))
        begins = [0]
        while begins[-1] < length:
            mean = self._bptt / 2 if draw.random() < _HALVED else self._bptt
            steps = round(draw.normal(mean, JITTER) / JITTER) * JITTER
            begins.append(begins[-1] + min(max(steps, JITTER), self._bptt + _MOST_JITTER))
        return [*begins[:-1], length]

    @property
    def batches_per_epoch(self) -> int:
        """Number of windows in the current epoch."""
        return len(self._begins) - 1

    def _batch(self, position: int) -> TextBatch:
        first, end = self._begins[position : position + 2]
        rate = (end - first) / self._bptt if self._jitter else 1.0
        return self._text.window(first, end - first, self._rows, rate)

    def shapes(self) -> list[BatchShape]:
        """Returns all window lengths of the current epoch, and the longest possible one."""
        counts = Counter(end - begin for begin, end in pairwise(self._begins))
        counts.setdefault(self._longest, 0)
        return [BatchShape(1, length, len(self._rows), count) for length, count in sorted(counts.items())]

    @property
    def _longest(self) -> int:
        return min(self._text.length, self._bptt + (_MOST_JITTER if self._jitter else 0))

    def worst_batch(self) -> TextBatch:
        """Returns a window of the longest possible length."""
        return self.largest_batch(1, self._longest)

    def largest_batch(self, source: int, target: int) -> TextBatch:  # noqa: ARG002  there is no source
        """Returns a window of ``target`` tokens at the beginning of the text."""
        return self._text.window(0, target, self._rows)


def whole_text(store: TokenStore, rows: int, window: int, context: int = 0) -> Iterator[TextBatch]:
    """Yields windows in which every token of a text is predicted once, in order.

    Args:
        store: token store of the text. rows: number of rows.
        window: maximum number of tokens of a row in one window.
        context: number of tokens before a row, at most its length, that it reads first; the first row has none.
    """
    text = TextRows(store, rows, keep_all=True)
    start = -min(context, text.length) if rows > 1 else 0
    for begin, end in ((start, 0), (0, text.length)):
        for first in range(begin, end, window):
            yield text.window(first, min(window, end - first), range(rows), start=start)
