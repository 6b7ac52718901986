"""Continuous batching: finished sentences leave their slots at once, and waiting ones take them.

On a GPU the work is replayed from CUDA graphs: encoding a batch, starting sentences, and a few steps at a time, after
which the host reads a small tensor that tells which sentences have finished. While the device computes the next steps,
the host reads the results of the previous ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.data.text.vocabulary import EOS, PAD
from econmt.decoding.search.beam import Hypothesis, SearchOptions, length_penalty, output_limits
from econmt.decoding.search.model import SearchGrid
from econmt.decoding.search.slots import Slots, hypotheses
from econmt_ops.dispatch.capture import GraphCache

STEPS = 4
"""Number of steps between two checks by the host; a finished sentence waits for half of them on average."""

SHORTEST = 64
"""Source positions of the shortest lane; each further lane has twice as many."""

ENCODED = 8
"""Multiple to which the source positions of an encoded batch are rounded up."""

WORTH = 64
"""Minimum number of sentences to capture graphs for; capturing takes as long as some hundred steps without graphs."""


class Sentence(NamedTuple):
    """Sentence to translate: source ids without EOS, and the largest number of output tokens before EOS."""

    ids: Sequence[int]
    limit: int


Run = Callable[[Hashable, Callable[[], object]], object]
"""Runs the function that a key identifies; see :meth:`econmt_ops.dispatch.capture.GraphCache.call`."""


def runner(device: torch.device, note: Callable[[str], object] | None = None) -> Run:
    """Returns a function that calls functions on a CPU, and on a GPU replays them from CUDA graphs.

    Functions that cannot be captured are called; for the first one, ``note`` is called with one line.
    """
    if device.type != "cuda":
        return lambda _, function: function()
    graphs, untold = GraphCache(device), [] if note is None else [note]

    def refused(reason: str) -> None:
        if untold:
            untold.pop()(f"no CUDA graphs for the search, whose kernels are launched one by one: {reason}")

    return lambda key, function: graphs.call(key, function, refused)


class _Copies:
    """Asynchronous copies of device tensors in CPU memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            self._tensors = [tensor.clone() for tensor in tensors]
            return
        self._tensors = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def wait(self) -> list[Tensor]:
        """Waits for the copies and returns them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


class _Finished(NamedTuple):
    """Finished sentences: their numbers, numbers of ended hypotheses, and the copies of their tensors."""

    numbers: list[int]
    counts: list[int]
    tables: _Copies


class _Lane:
    """Slots for sentences of at most ``positions`` source tokens, including EOS, and their graphs."""

    def __init__(
        self,
        grid: SearchGrid,
        options: SearchOptions,
        device: torch.device,
        run: Run,
        slots: int,
        positions: int,
    ) -> None:
        self._device, self._run, self._grid = device, run, grid
        self._size, self._positions = slots, positions
        self._most = limit = int(output_limits(torch.tensor([positions]), options.max_output_factor))
        self._nbest = options.nbest_size
        self._penalties = length_penalty(torch.arange(limit + 2), options).tolist()
        seen = positions if options.attention else None
        self._slots = Slots(grid, slots, limit + 2, seen, options, device)
        self._sources: dict[int, Tensor] = {}
        self._lengths, self._limits = torch.ones(2, slots, dtype=torch.int64, device=device)
        self._pairs = torch.zeros(2, max(1, slots // 4), dtype=torch.int64, device=device)
        self._state = self._slots.state()

    def search(
        self, sentences: Sequence[Sentence], poll: Callable[[], object]
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yields the number and the hypotheses of each sentence, in the order in which they finish."""
        owners: dict[int, int] = {}
        waiting: list[tuple[int, int]] = []
        begun, finished = 0, None
        while True:
            poll()
            free = [slot for slot in range(self._size) if slot not in owners]
            while free and (waiting or begun < len(sentences)):
                if not waiting:
                    batch = sentences[begun : begun + self._size]
                    self._encode(batch)
                    waiting = list(enumerate(range(begun, begun + len(batch))))
                    begun += len(batch)
                count = min(len(free), len(waiting), self._pairs.shape[1])
                self._begin(free[:count], [entry for entry, _ in waiting[:count]])
                owners.update(zip(free, (number for _, number in waiting[:count]), strict=False))
                free, waiting = free[count:], waiting[count:]
            if owners:
                self._run((self._positions, "steps"), self._advance)
            state = _Copies([self._state])
            if finished is not None:
                yield from self._read(finished, sentences)
            if not owners:
                return
            finished = self._finish(owners, *state.wait()[0].tolist())

    def _finish(self, owners: dict[int, int], taken: list[int], counts: list[int]) -> _Finished | None:
        """Removes finished sentences from their slots."""
        done = [slot for slot in owners if taken[slot] > 0]
        if not done:
            return None
        slots = torch.empty(len(done), dtype=torch.int64, device=self._device)
        _fill(slots, done)
        tables = _Copies(self._slots.read(slots, max(taken[slot] for slot in done)))
        return _Finished([owners.pop(slot) for slot in done], [counts[slot] for slot in done], tables)

    def _read(
        self, finished: _Finished, sentences: Sequence[Sentence]
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        tables = finished.tables.wait()
        for row, (number, count) in enumerate(zip(finished.numbers, finished.counts, strict=True)):
            ended, grown, *seen = (table[row] for table in tables)
            ids, limit = sentences[number]
            attention = seen[0] if seen else None
            tensors = ended[:count], grown, attention
            yield number, hypotheses(*tensors, len(ids) + 1, limit, self._penalties, self._nbest)

    def _encode(self, batch: Sequence[Sentence]) -> None:
        """Encodes the waiting sentences; unused entries of the buffer get a sentence of only EOS."""
        size = -(-max(len(sentence.ids) + 1 for sentence in batch) // ENCODED) * ENCODED
        size = min(size, self._positions)
        rows = [[*sentence.ids, EOS] for sentence in batch]
        rows += [[EOS]] * (self._size - len(rows))
        assert all(sentence.limit <= self._most for sentence in batch)
        limits = [sentence.limit for sentence in batch] + [0] * (self._size - len(batch))
        if size not in self._sources:
            self._sources[size] = torch.zeros(self._size, size, dtype=torch.int64, device=self._device)
        source = self._sources[size]
        _fill(source, [row + [PAD] * (size - len(row)) for row in rows])
        _fill(self._lengths, [len(row) for row in rows])
        _fill(self._limits, limits)
        self._run((self._positions, "encode", size), lambda: self._grid.encode(source, self._lengths))

    def _begin(self, slots: list[int], entries: list[int]) -> None:
        """Starts waiting sentences; the last one is repeated to fill the fixed shape of the graph."""
        missing = self._pairs.shape[1] - len(slots)
        _fill(self._pairs, [slots + slots[-1:] * missing, entries + entries[-1:] * missing])
        self._run(
            (self._positions, "begin"),
            lambda: self._slots.begin(self._pairs[0], self._pairs[1], self._limits),
        )

    def _advance(self) -> None:
        for _ in range(STEPS):
            self._slots.step()
        self._state.copy_(self._slots.state())


class ContinuousSearch:
    """Continuous beam search; hypotheses equal those of :func:`econmt.decoding.search.beam.beam_search`.

    Lanes and their graphs are kept for the next call.

    Args:
        make_grid: function from numbers of slots, rows per slot and source positions to the grid of a model in
            evaluation mode.
        slots: maximum number of sentences translated together.
        tokens: maximum number of padded source tokens in a lane of several slots; long sentences get fewer slots.
        note: see :func:`runner`.
    """

    def __init__(
        self,
        make_grid: Callable[[int, int, int], SearchGrid],
        options: SearchOptions,
        device: torch.device,
        slots: int,
        tokens: int,
        note: Callable[[str], object] | None = None,
    ) -> None:
        assert options.sample is None
        self._make_grid, self._options = make_grid, options
        self._slots, self._tokens = slots, tokens
        self._device, self._run = device, runner(device, note)
        self._lanes: dict[int, _Lane] = {}

    def worthwhile(self, lengths: Sequence[int]) -> list[list[int]]:
        """Returns groups of indices of sentences for which this search pays; lengths exclude EOS."""
        lanes: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            lanes.setdefault(_positions(length), []).append(index)
        return [
            indices
            for positions, indices in lanes.items()
            if len(indices) >= WORTH or positions in self._lanes
        ]

    @torch.inference_mode()
    def search(
        self, sentences: Sequence[Sentence], poll: Callable[[], object] = lambda: None
    ) -> list[list[Hypothesis]]:
        """Returns the n best hypotheses of each sentence, best first.

        ``poll`` is called every few steps; an exception that it raises ends the search.
        """
        longest = max(len(sentence.ids) for sentence in sentences)
        positions = _positions(longest)
        if positions not in self._lanes:
            slots = max(1, min(self._slots, self._tokens // positions))
            grid = self._make_grid(slots, self._options.beam_size, positions)
            self._lanes[positions] = _Lane(grid, self._options, self._device, self._run, slots, positions)
        # Longest first, because they take longest, and so that sentences of similar length are encoded together.
        order = sorted(range(len(sentences)), key=lambda index: -len(sentences[index].ids))
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        for number, best in self._lanes[positions].search([sentences[index] for index in order], poll):
            results[order[number]] = best
        return results


def _positions(length: int) -> int:
    """Returns the source positions of the lane for sentences of ``length`` tokens without EOS."""
    positions = SHORTEST
    while positions < length + 1:
        positions *= 2
    return positions


def _fill(tensor: Tensor, values: Sequence[object]) -> None:
    """Copies numbers into a tensor without synchronisation."""
    host = torch.tensor(values)
    tensor.copy_(host.pin_memory() if tensor.is_cuda else host, non_blocking=True)
