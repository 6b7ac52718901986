"""Batches of one long text for truncated backpropagation through time.

The text is cut into B rows of equal length, which stand below each other. A batch is a window over all rows: the next
``bptt`` tokens of each, to be predicted from the tokens one before. The next batch is the window after it, so that the
model can go on with the state that it had at the end of the one before: ``carries`` says whether it does, and ``rows``
which state is whose. At the beginning of the text, once an epoch, it does not.

The first token is predicted from an end of line, as every line's first is. What does not fill B rows, fewer than B
tokens at the end of the text, is not learnt; in evaluation it is read too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from econmt.data.batching.batch import AnyBatch, BatchShape
from econmt.data.batching.token_store import TokenStore
from econmt.data.text.subwords import EOS, PAD
from econmt.errors import InputError

JITTER = 5
"""Jittered windows are multiples of this long, so that few shapes occur; also their standard deviation."""

_MOST_JITTER = 20
"""How much longer than ``bptt`` a jittered window is at most."""

_HALVED = 0.05
"""The share of jittered windows whose mean is half of ``bptt`` (Merity et al., 2018, section 4.1)."""


@dataclass(frozen=True)
class TextBatch(AnyBatch):
    """A window of a text: B rows, T tokens, all tensors int64."""

    inputs: torch.Tensor
    """(B, T): tokens to read."""
    targets: torch.Tensor
    """(B, T): the token after each; padding where a row has ended."""
    rows: torch.Tensor
    """(B,): which carried state each row goes on with, from 1; padding rows have that of no row, 0."""
    carries: torch.Tensor
    """(B,): 1 if the row goes on with its state, 0 if it begins anew."""
    rate_factor: float = 1.0
    """See :attr:`rate`."""

    @property
    def positions(self) -> tuple[int, int]:
        """1 and T: there is no source."""
        return 1, self.inputs.shape[1]

    @property
    def size_text(self) -> str:
        """As "20 rows of 35 tokens"."""
        return f"{len(self.indices)} rows of {self.inputs.shape[1]} tokens"

    @property
    def rate(self) -> float:
        """T by ``bptt`` where windows are drawn, so that a short one moves the parameters less."""
        return self.rate_factor

    def renumbered(self) -> TextBatch:
        """See :meth:`econmt.data.batching.batch.AnyBatch.renumbered`."""
        return replace(self, rows=torch.arange(1, len(self.rows) + 1))

    def part(self, rows: slice) -> TextBatch:
        """Some rows."""
        tensors = self._tensors(rows)
        count = int((tensors["targets"] != PAD).sum())
        return TextBatch(**tensors, target_tokens=count, rate_factor=self.rate_factor)


class TextRows:
    """A text as one row of tokens, read where it is needed.

    Args:
        store: its lines, an end of line after each.
        rows: B, into which it is cut.
        whole: the last row may be shorter than the others; else fewer than B tokens at the end are left out.
    """

    def __init__(self, store: TokenStore, rows: int, *, whole: bool = False) -> None:
        self.store = store
        self.rows = rows
        self.length = -(-store.total_tokens // rows) if whole else store.total_tokens // rows
        """Tokens of a row."""

    def window(self, first: int, count: int, rows: range, rate: float = 1.0, *, start: int = 0) -> TextBatch:
        """Tokens ``first`` to ``first + count`` of some rows, counted from 0.

        Args:
            first: below 0 for tokens before a row's own, which are read and not predicted; the first row has none.
            count: number of tokens of each row.
            rows: the rows.
            rate: factor of the learning rate.
            start: value of ``first`` at which rows begin without a state.
        """
        ids = np.full((len(rows), count + 1), PAD, dtype=np.int64)
        places = np.array([row * self.length + first for row in rows], dtype=np.int64)
        for row, place in zip(ids, places.tolist(), strict=True):
            if place < 0:
                continue
            begin = max(place - 1, 0)
            found = self.store.tokens(begin, max(0, min(place + count, self.store.total_tokens) - begin))
            row[begin - place + 1 :][: len(found)] = found
            if place == 0:
                row[0] = EOS
        targets = np.full_like(ids[:, 1:], PAD) if first < 0 else ids[:, 1:].copy()
        carries = (places > 0) & (first > start)
        return TextBatch(
            indices=torch.from_numpy(self.store.pairs_at(np.maximum(places, 0)).astype(np.int64)),
            inputs=torch.from_numpy(ids[:, :-1].copy()),
            targets=torch.from_numpy(targets),
            rows=torch.tensor(rows, dtype=torch.int64) + 1,
            carries=torch.from_numpy(carries.astype(np.int64)),
            target_tokens=int((targets != PAD).sum()),
            rate_factor=rate,
        )


class TextBatches:
    """The endless stream of windows over a text, epoch after epoch; see :class:`econmt.data.batching.batch.Batches`.

    Args:
        store: the text.
        rows: B.
        bptt: tokens of a window.
        jitter: draw each window's length around that.
        seed: of the draws.

    Raises:
        InputError: the text has fewer tokens than there are rows.
    """

    def __init__(
        self,
        store: TokenStore,
        rows: int,
        bptt: int,
        *,
        jitter: bool = False,
        seed: int = 0,
    ) -> None:
        if store.total_tokens < rows:
            raise InputError(
                f"the training text has {store.total_tokens:,} tokens, fewer than training.batch.size {rows}; give "
                "more text or fewer rows"
            )
        self._text = TextRows(store, rows)
        self._bptt, self._jitter, self._seed = bptt, jitter, seed
        self._rows = range(rows)
        self._go_to(0, 0)

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._begins = self._cut(epoch)

    def _cut(self, epoch: int) -> list[int]:
        """Where the windows of an epoch begin, and the end."""
        length = self._text.length
        if not self._jitter:
            return [*range(0, length, self._bptt), length]
        draw = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        begins = [0]
        while begins[-1] < length:
            mean = self._bptt / 2 if draw.random() < _HALVED else self._bptt
            steps = round(draw.normal(mean, JITTER) / JITTER) * JITTER
            begins.append(begins[-1] + min(max(steps, JITTER), self._bptt + _MOST_JITTER))
        return [*begins[:-1], length]

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        """Number of windows in the running epoch."""
        return len(self._begins) - 1

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands; JSON-able."""
        return {"epoch": self._epoch, "position": self._position, "batches_per_epoch": self.batches_per_epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to where :meth:`state_dict` was taken, or to the same share of the epoch if it is cut otherwise now."""
        self._go_to(int(state["epoch"]), 0)
        then, now = int(state["batches_per_epoch"]), self.batches_per_epoch
        position = int(state["position"])
        self._position = position if then == now else min(position * now // then, now - 1)

    def __iter__(self) -> Iterator[TextBatch]:
        return self

    def __next__(self) -> TextBatch:
        first, end = self._begins[self._position : self._position + 2]
        rate = (end - first) / self._bptt if self._jitter else 1.0
        batch = self._text.window(first, end - first, self._rows, rate)
        if self._position + 1 == self.batches_per_epoch:
            self._go_to(self._epoch + 1, 0)
        else:
            self._position += 1
        return batch

    def shapes(self) -> list[BatchShape]:
        """Every length of a window that the running epoch has, the longest possible one included."""
        found = Counter(end - begin for begin, end in pairwise(self._begins))
        found.setdefault(self._longest, 0)
        return [BatchShape(1, length, len(self._rows), count) for length, count in sorted(found.items())]

    @property
    def _longest(self) -> int:
        return min(self._text.length, self._bptt + (_MOST_JITTER if self._jitter else 0))

    def worst_batch(self) -> TextBatch:
        """A window of the longest length."""
        return self.largest_batch(1, self._longest)

    def largest_batch(self, source: int, target: int) -> TextBatch:  # noqa: ARG002  there is no source
        """A window of ``target`` tokens, at the beginning of the text."""
        return self._text.window(0, target, self._rows)


def whole_text(store: TokenStore, rows: int, window: int, context: int = 0) -> Iterator[TextBatch]:
    """Yields windows of at most ``window`` tokens in which every token of a text is predicted once, in order.

    Args:
        store: the text.
        rows: number of rows that it is cut into.
        window: most tokens of a row at once.
        context: number of tokens before its own that each row but the first reads first, at most a row.
    """
    text = TextRows(store, rows, whole=True)
    start = -min(context, text.length) if rows > 1 else 0
    for begin, end in ((start, 0), (0, text.length)):
        for first in range(begin, end, window):
            yield text.window(first, min(window, end - first), range(rows), start=start)
