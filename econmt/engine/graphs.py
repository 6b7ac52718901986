"""Training steps as CUDA graphs: captured once for each shape of batches, replayed from then on.

A step of a recurrent model is thousands of small kernels, and launching them from Python takes longer than running
them. A graph launches them all at once. Everything that changes from step to step lies in tensors at fixed places: the
batch and its number of tokens, the learning rate, the seeds of dropout, the counters of the optimizer; so nothing waits
for the device. All graphs share one pool of memory, since they run one after another and keep nothing from one to the
next but parameters and optimizer state, which lie outside.

Updates of one batch are one graph. Of updates of several batches (``training.update_interval``, a byte budget's
micro-batches) each batch is a graph that adds to the gradients, which then stay where they are, and the update is
another.

Over several ranks the messages with gradients are part of the graph, beside the kernels of the backward pass; of an
update of several batches they are in the last graph. All ranks capture and replay the same shapes in the same order,
and the communicator is there before: parameters have gone through it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.data.batching.batch import AnyBatch
from econmt.data.text.subwords import PAD
from econmt.engine.devices import is_out_of_memory
from econmt.engine.step import StepResult, TrainingStep
from econmt.model import Implementations
from econmt_ops.dispatch.capture import Capturer, first_error, release_workspaces

_HOST_BUFFERS = 4
"""Batches that may be on their way to the device while the next one is written."""


class _Inputs:
    """A batch and its number of tokens at a fixed place on the device, filled by one copy from pinned memory.

    Args:
        batch: one of its shape.
        rows: room for so many.
        device: a CUDA device.
    """

    def __init__(self, batch: AnyBatch, rows: int, device: torch.device) -> None:
        fields = _tensors(batch)
        self._shapes = [torch.Size((rows, *tensor.shape[1:])) for tensor in fields.values()]
        self._sizes = [*(shape.numel() for shape in self._shapes), 1]
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self._hosts = [
            torch.zeros(len(self._flat), dtype=torch.int64).pin_memory() for _ in range(_HOST_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts]  # type: ignore[no-untyped-call]
        self._next = 0
        *parts, tokens = torch.split(self._flat, self._sizes)
        views = {
            name: part.view(shape) for name, part, shape in zip(fields, parts, self._shapes, strict=True)
        }
        changes: dict[str, Any] = {**views, "indices": torch.full((rows,), -1)}
        self.batch = dataclasses.replace(batch, **changes)
        self.tokens = tokens[0]
        self.rows = rows

    def fill(self, batch: AnyBatch, tokens: int) -> None:
        """Enqueues the copy of a batch that lies on the CPU; rows that it lacks stand in and have no gradient."""
        host, copied = self._hosts[self._next], self._copied[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        copied.synchronize()  # of some batches ago, so there is nothing to wait for
        *parts, count = torch.split(host, self._sizes)
        for part, shape, (name, tensor) in zip(parts, self._shapes, _tensors(batch).items(), strict=True):
            rows = part.view(shape)
            rows[: len(tensor)] = tensor
            rows[len(tensor) :] = batch.filler.get(name, PAD)
        count.fill_(tokens)
        self._flat.copy_(host, non_blocking=True)
        copied.record()


class _Captured(NamedTuple):
    """A graph, where its batch goes, and what it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: _Inputs
    result: StepResult | None


def _tensors(batch: AnyBatch) -> dict[str, Tensor]:
    """The tensors of a batch that the device gets; a row's index in the store stays on the CPU."""
    return {
        field.name: value
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and field.name != "indices"
    }


def _lean(phase: str, _: object) -> None:
    """Watches a step: backward passes have a thread of their own, and with it a workspace of cuBLAS of their own."""
    if phase == "backward":
        release_workspaces()


class GraphedStep:
    """A training step on a CUDA device that replays graphs.

    What cannot be captured runs as the step itself runs, and the reason is told once.

    Args:
        step: the training step.
        several: whether updates are of several batches; where it is False, one that is all the same is not replayed.
        note: gets one line a shape that cannot be captured.
        most_rows: of any batch of a batch's shape; None: batches have the rows that they have. A graph is captured for
            so many, and smaller batches are filled up, so that which graph a batch runs in, and with it rounding and
            masks, does not depend on what came before.

    Attributes:
        step: see above.
        captured: how many graphs there are.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        several: bool = False,
        note: Callable[[str], object] | None = None,
        most_rows: Callable[[AnyBatch], int] | None = None,
    ) -> None:
        self.step = step
        self._several = several
        self._note = note
        self._most_rows = most_rows
        self._capturer = Capturer(step.device, threads=step.communicator.size > 1)
        self._graphs: dict[tuple[Implementations, tuple[int, int]], list[_Captured]] = {}
        self._refused: set[tuple[Implementations, tuple[int, int]]] = set()
        self._update: tuple[torch.cuda.CUDAGraph, StepResult] | None = None
        self._total = torch.zeros((), device=step.device)
        step.prepare(gradients=several)
        step.keeps_gradients = several

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        return sum(map(len, self._graphs.values())) + (self._update is not None)

    def __call__(
        self,
        batches: Sequence[AnyBatch],
        implementations: Sequence[Implementations] | None = None,
        tokens: int | None = None,
    ) -> StepResult:
        """One update of the parameters; see :meth:`econmt.engine.step.TrainingStep.run`.

        Args:
            batches: on the CPU; their gradients are added up.
            implementations: of the ops for each batch; None: the step's.
            tokens: by which the sum of their losses is divided; None: the target tokens of the batches.

        Returns:
            Scalars on the device that hold until the next call.
        """
        chosen = implementations or [self.step.implementations] * len(batches)
        found = []
        before = self.captured + len(self._refused)
        for number, (batch, how) in enumerate(zip(batches, chosen, strict=True)):
            self.step.number = number
            found.append(self._find(batch, how))
        self.step.number = None
        if self.captured + len(self._refused) != before:
            self.step.agree()
        if any(each is None for each in found) or (len(batches) > 1 and not self._several):
            moved = [batch.to(self.step.device) for batch in batches]
            return self.step.run(moved, self.step.tokens(batches, tokens), chosen)
        if tokens is None:
            tokens = sum(batch.target_tokens for batch in batches)
        for each, batch in zip(found, batches, strict=True):
            assert each is not None
            each.inputs.fill(batch, tokens)
            each.graph.replay()
            if each.result is not None:
                return each.result
        if self._update is None:
            self._update = self._capture_update()
        graph, result = self._update
        graph.replay()
        return result

    def capture(self, batch: AnyBatch, implementations: Implementations | None = None) -> None:
        """Captures the graph for batches of this shape, if there is none yet; the largest shape should come first.

        Raises:
            RuntimeError: there is too little memory.
        """
        self._find(batch, implementations or self.step.implementations)

    def release(self) -> None:
        """Gives back the graphs, whoever still has them, and their memory."""
        torch.cuda.synchronize(self.step.device)
        for captured in itertools.chain.from_iterable(self._graphs.values()):
            captured.graph.reset()
        self._graphs.clear()
        if self._update is not None:
            self._update[0].reset()
            self._update = None
        torch.cuda.synchronize(self.step.device)
        torch.cuda.empty_cache()

    def _find(self, batch: AnyBatch, implementations: Implementations) -> _Captured | None:
        """The graph for a batch, captured if need be: one of as many rows or more; None if there can be none."""
        key = implementations, batch.positions
        if key in self._refused:
            return None
        rows = self._capacity(batch)
        there = [each for each in self._graphs.get(key, ()) if each.inputs.rows >= rows]
        if there:
            return min(there, key=lambda each: each.inputs.rows)
        try:
            made = self._capture(batch, implementations)
        except RuntimeError as error:
            first = first_error(error)
            if is_out_of_memory(first):
                raise first from None
            self._refused.add(key)
            if self._note is not None:
                reason = str(first).strip().splitlines()[0]
                self._note(
                    f"no CUDA graph for batches of {batch.size_text}, which are launched kernel by kernel: {reason}"
                )
            return None
        self._graphs.setdefault(key, []).append(made)
        return made

    def _capacity(self, batch: AnyBatch) -> int:
        """Rows of the graph that a batch runs in."""
        rows = len(batch.indices)
        return rows if self._most_rows is None else max(rows, self._most_rows(batch))

    def _capture(self, batch: AnyBatch, implementations: Implementations) -> _Captured:
        step = self.step
        inputs = _Inputs(batch, self._capacity(batch), step.device)
        inputs.fill(batch, batch.target_tokens)
        self._warm_up(inputs, implementations)

        def run() -> StepResult | None:
            if self._several:
                self._total += step.accumulate(inputs.batch, inputs.tokens, implementations, _lean)
                return None
            result = step.run([inputs.batch], inputs.tokens, [implementations], _lean)
            step.clear()
            return result

        graph, result = self._capturer.capture(run)
        return _Captured(graph, inputs, result)

    def _capture_update(self) -> tuple[torch.cuda.CUDAGraph, StepResult]:
        """The graph that ends an update of several batches: clip, update, and zeros for the next one's gradients."""
        step = self.step

        def run() -> StepResult:
            result = step.finish(self._total.clone())
            step.update()
            step.clear()
            self._total.zero_()
            return result

        return self._capturer.capture(run)

    def _warm_up(self, inputs: _Inputs, implementations: Implementations) -> None:
        """Runs forward and backward pass once, see `Capturer.warming_up`.

        It leaves no trace: gradients, seeds and what is carried are as before, and parameters are not touched.
        """
        step = self.step
        parameters = step.parameters
        kept, gradients = step.random_state(), [part.grad for part in parameters]
        carried = step.carried()
        for part in parameters:
            part.grad = None
        try:
            with self._capturer.warming_up():
                step.accumulate(inputs.batch, inputs.tokens, implementations, _lean)
        finally:
            for part, gradient in zip(parameters, gradients, strict=True):
                part.grad = gradient
            step.set_random_state(kept)
            step.set_carried(carried)
        torch.cuda.synchronize(step.device)
        # What the warm-up took would lie beside the pool as long as the run lasts.
        torch.cuda.empty_cache()
