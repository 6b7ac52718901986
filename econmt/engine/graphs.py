"""Training steps as CUDA graphs: captured once for each shape of batches, replayed from then on.

A step of a recurrent model is thousands of small kernels, and launching them from Python takes longer than running them.
A graph launches them all at once. Everything that changes from step to step lies in tensors at fixed places: the batch
and its number of tokens, the learning rate, the seeds of dropout, the counters of the optimizer; so nothing waits for the
device. All graphs share one pool of memory, since they run one after another and keep nothing from one to the next but
parameters and optimizer state, which lie outside.

Updates of one batch are one graph. Of updates of several batches (``training.update_interval``, a byte budget's
micro-batches) each batch is a graph that adds to the gradients, which then stay where they are, and the update is another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.data.batches import Batch
from econmt.engine.step import StepResult, TrainingStep
from econmt.model import Implementations
from econmt_ops.core.memory import is_out_of_memory

_HOST_BUFFERS = 4
"""Batches that may be on their way to the device while the next one is written."""


class _Key(NamedTuple):
    """What a graph was captured for: one batch's shapes and the ops' implementations; several batches or one."""

    shapes: tuple[torch.Size, ...]
    implementations: Implementations
    whole: bool


class _Inputs:
    """A batch and its number of tokens at a fixed place on the device, filled by one copy from pinned memory."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        fields = _tensors(batch)
        self._sizes = [tensor.numel() for tensor in fields.values()]
        length = sum(self._sizes) + 1
        self._flat = torch.empty(length, dtype=torch.int64, device=device)
        self._hosts = [torch.empty(length, dtype=torch.int64, pin_memory=True) for _ in range(_HOST_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in self._hosts]
        self._next = 0
        parts = torch.split(self._flat, [*self._sizes, 1])
        views = {
            name: part.view(tensor.shape) for (name, tensor), part in zip(fields.items(), parts, strict=False)
        }
        self.batch: Batch = dataclasses.replace(batch, **views)
        self.tokens = parts[-1][0]
        self.bytes = self._flat.nbytes

    def fill(self, batch: Batch, tokens: int) -> None:
        """Enqueues the copy of a batch that lies on the CPU."""
        host, copied = self._hosts[self._next], self._copied[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        copied.synchronize()  # of some batches ago, so there is nothing to wait for
        fields = _tensors(batch).values()
        for part, tensor in zip(torch.split(host, [*self._sizes, 1]), fields, strict=False):
            part.copy_(tensor.reshape(-1))
        host[-1] = tokens
        self._flat.copy_(host, non_blocking=True)
        copied.record()


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: _Inputs
    result: Any


def _tensors(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch that the device gets; a row's index in the store stays on the CPU."""
    return {
        field.name: value
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and field.name != "indices"
    }


class GraphedStep:
    """A training step on a CUDA device that replays graphs.

    What cannot be captured runs as the step itself runs, and the reason is told once.

    Args:
        step: the training step.
        several: whether updates may be of several batches.
        note: gets one line a shape that cannot be captured.

    Attributes:
        step: see above.
        captured: how many graphs there are.
    """

    def __init__(
        self, step: TrainingStep, *, several: bool = False, note: Callable[[str], object] | None = None
    ) -> None:
        self.step = step
        self._several = several
        self._note = note
        self._stream = torch.cuda.Stream(step.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[_Key, _Captured | None] = {}
        self._update: _Captured | None = None
        self._total = torch.zeros((), device=step.device)
        step.prepare(gradients=several)
        step.keeps_gradients = several

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return sum(found is not None for found in self._graphs.values()) + (self._update is not None)

    def __call__(
        self, batches: Sequence[Batch], implementations: Sequence[Implementations] | None = None
    ) -> StepResult:
        """One update of the parameters; see :meth:`econmt.engine.step.TrainingStep.run`.

        Args:
            batches: on the CPU; their gradients are added up.
            implementations: of the ops for each batch; None: the step's.

        Returns:
            Scalars on the device that hold until the next call.
        """
        tokens = sum(batch.target_tokens for batch in batches)
        chosen = implementations or [self.step.implementations] * len(batches)
        found = [self._find(batch, which) for batch, which in zip(batches, chosen, strict=True)]
        if any(graph is None for graph in found):
            device = self.step.device
            return self.step.run(
                [batch.to(device) for batch in batches], self.step.tokens(batches), implementations
            )
        for graph, batch in zip(found, batches, strict=True):
            assert graph is not None
            graph.inputs.fill(batch, tokens)
            graph.graph.replay()
        if not self._several:
            assert found[0] is not None
            result: StepResult = found[0].result
            return result
        if self._update is None:
            self._update = self._capture_update()
        self._update.graph.replay()
        result = self._update.result
        return result

    def capture(self, batch: Batch, implementations: Implementations | None = None) -> None:
        """Captures the graph for batches of this shape, if there is none yet; the largest shape should come first."""
        self._find(batch, implementations or self.step.implementations)

    def release(self) -> None:
        """Gives back the graphs and their memory."""
        self._graphs.clear()
        self._update = None
        torch.cuda.synchronize(self.step.device)
        torch.cuda.empty_cache()

    def _find(self, batch: Batch, implementations: Implementations) -> _Captured | None:
        """The graph for a batch, captured if need be; None if it cannot be."""
        shapes = tuple(tensor.shape for tensor in _tensors(batch).values())
        key = _Key(shapes, implementations, not self._several)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(batch, implementations)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self._graphs[key] = None
                if self._note is not None:
                    size = " x ".join(str(length) for length in batch.source.shape)
                    reason = str(error).strip().splitlines()[0]
                    self._note(f"no CUDA graph for batches of {size} source positions: {reason}")
        return self._graphs[key]

    def _capture(self, batch: Batch, implementations: Implementations) -> _Captured:
        step = self.step
        inputs = _Inputs(batch, step.device)
        inputs.fill(batch, batch.target_tokens)
        self._warm_up(inputs, implementations)
        graph = torch.cuda.CUDAGraph()
        result: StepResult | None = None
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            if self._several:
                self._total += step.accumulate(inputs.batch, inputs.tokens, implementations)
            else:
                result = step.run([inputs.batch], inputs.tokens, [implementations])
                step.clear()
        return _Captured(graph, inputs, result)

    def _capture_update(self) -> _Captured:
        """The graph that ends an update of several batches: clip, update, and zeros for the next one's gradients."""
        step = self.step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = step.finish(self._total.clone())
            step.update()
            step.clear()
            self._total.zero_()
        assert self._graphs
        some = next(found for found in self._graphs.values() if found is not None)
        return _Captured(graph, some.inputs, result)

    def _warm_up(self, inputs: _Inputs, implementations: Implementations) -> None:
        """Runs forward and backward pass once outside the pool: kernels are compiled, libraries make their handles.

        It leaves no trace: gradients and seeds are as before, and parameters are not touched.
        """
        step = self.step
        kept = step.seeds.seeds.clone()
        gradients = [part.grad for part in step.model.parameters()]
        for part in step.model.parameters():
            part.grad = None
        self._stream.wait_stream(torch.cuda.current_stream(step.device))
        with torch.cuda.stream(self._stream):
            step.accumulate(inputs.batch, inputs.tokens, implementations)
        torch.cuda.current_stream(step.device).wait_stream(self._stream)
        for part, gradient in zip(step.model.parameters(), gradients, strict=True):
            part.grad = gradient
        step.seeds.seeds.copy_(kept)
        torch.cuda.synchronize(step.device)
        # What the warm-up took would lie beside the pool as long as the run lasts.
        torch.cuda.empty_cache()
