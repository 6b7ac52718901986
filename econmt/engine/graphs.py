"""Training steps as CUDA graphs: captured once for each batch shape, then replayed.

A step of a recurrent model consists of thousands of small kernels, and launching them from Python takes longer than
running them. A graph launches them all at once. Everything that changes from step to step is in tensors at fixed
addresses (the batch and its number of tokens, the learning rate, dropout seeds, the optimizer's counters), so that the
host never waits for the device. All graphs share one memory pool: they run one after another and keep nothing but
parameters and optimizer state, which are outside the pool.

An update from one batch is one graph. In an update from several batches (``training.update_interval``, micro-batches of
a memory budget), each batch is a graph that adds to persistent gradients, and the optimizer's update is another graph.

With several ranks, the gradient all-reduce is part of the graph and overlaps the backward pass; in an update from
several batches it is in the last graph. All ranks capture and replay the same shapes in the same order, after a first
broadcast of the parameters has set up the communicator. A shape that one rank cannot capture runs eagerly on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from econmt.data.batching.batch import AnyBatch
from econmt.engine.devices import is_out_of_memory
from econmt.engine.step import StepResult, TrainingStep
from econmt.model import Implementations
from econmt_ops.backends import triton as kernels
from econmt_ops.dispatch.capture import CapturedGraph, GraphCache, release_workspaces

_UPDATE = "update"
"""Key of the graph that ends an update from several batches."""

_HOST_BUFFERS = 4
"""Pinned buffers, so that a batch can be written while earlier ones are still copied to the device."""


class _Inputs:
    """Batch and number of tokens at a fixed address on the device, filled by one copy from pinned memory."""

    def __init__(self, batch: AnyBatch, rows: int, device: torch.device) -> None:
        filled = batch.filled(rows)
        fields = _tensors(filled)
        self._sizes = [*(tensor.numel() for tensor in fields.values()), 1]
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self._hosts = [
            torch.zeros(len(self._flat), dtype=torch.int64).pin_memory() for _ in range(_HOST_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts]  # type: ignore[no-untyped-call]
        self._next = 0
        *flat_fields, tokens = torch.split(self._flat, self._sizes)
        changes: dict[str, Any] = {
            name: flat.view(tensor.shape)
            for (name, tensor), flat in zip(fields.items(), flat_fields, strict=True)
        }
        self.batch = dataclasses.replace(filled, **changes)
        self.tokens = tokens[0]
        self.rows = rows

    def fill(self, batch: AnyBatch, tokens: int) -> None:
        """Enqueues the copy of a batch from the CPU; missing rows are filled with padding, which has no gradient."""
        host, copied = self._hosts[self._next], self._copied[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        copied.synchronize()  # this copy is several batches old, so this does not wait
        *flat_fields, count = torch.split(host, self._sizes)
        for flat, tensor in zip(flat_fields, _tensors(batch.filled(self.rows)).values(), strict=True):
            flat.copy_(tensor.flatten())
        count.fill_(tokens)
        self._flat.copy_(host, non_blocking=True)
        copied.record()


def _tensors(batch: AnyBatch) -> dict[str, Tensor]:
    """Returns the tensors of a batch that are copied to the device: all but the row indices."""
    return {
        field.name: value
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and field.name != "indices"
    }


def _free_workspaces(phase: str, _: object) -> None:
    """Frees cuBLAS workspaces before the backward pass, whose own thread allocates further ones."""
    if phase == "backward":
        release_workspaces()


class GraphedStep:
    """A training step on a CUDA device that replays CUDA graphs.

    Shapes that cannot be captured run eagerly, and the reason is reported once for each shape.

    Args:
        several: True if updates may consist of several batches; if False, an update of several batches runs eagerly.
        note: Called with one line for each shape that cannot be captured.
        most_rows: Returns the largest number of rows of any batch with the shape of a given one. A graph is captured
            for that many rows and smaller batches are padded, so that the graph of a batch, and with it rounding and
            dropout masks, does not depend on the batches before it. None: each number of rows gets its own graph.
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
        self._several = step.keeps_gradients = several
        self._note = note
        self._most_rows = most_rows
        self._graphs = GraphCache(step.device, threads=step.communicator.size > 1)
        self._total = torch.zeros((), device=step.device)
        step.prepare(gradients=several)

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs.graphs)

    def __call__(
        self,
        batches: Sequence[AnyBatch],
        implementations: Sequence[Implementations] | None = None,
        tokens: int | None = None,
    ) -> StepResult:
        """Updates the parameters once; see :meth:`econmt.engine.step.TrainingStep.run`.

        Args:
            batches: Batches on the CPU, whose gradients are added up.
            implementations: Implementations of the ops for each batch; None: those of the step.
            tokens: Divisor of the sum of the losses; None: the number of target tokens of the batches.

        Returns:
            Scalars on the device, valid until the next call.
        """
        chosen = implementations or [self.step.implementations] * len(batches)
        # Memory has run out for a batch that was planned whole; no graph is replayed.
        splits = len(batches) > 1 and not self._several
        graphs = [] if splits else self._find_all(batches, chosen, ends=self._several)
        if splits or None in graphs:
            moved = [batch.to(self.step.device) for batch in batches]
            result = self.step.run(moved, self.step.tokens(batches, tokens), chosen)
            self.step.clear()  # graphs of further batches add to the gradients
            return result
        if tokens is None:
            tokens = sum(batch.target_tokens for batch in batches)
        for entry, batch in itertools.zip_longest(graphs, batches):
            assert entry is not None
            inputs, result = entry.result
            if inputs is not None:
                inputs.fill(batch, tokens)
            entry.graph.replay()
        assert isinstance(result, StepResult)
        return result

    def warm_up(self, batches: Iterable[tuple[AnyBatch, Implementations]]) -> list[AnyBatch]:
        """Prepares the capture of the shapes of these batches; their Triton kernels are compiled in parallel.

        Returns:
            The batches for which there is too little memory, whose shapes are not prepared.

        Raises:
            RuntimeError: There is too little memory for a stage of a pipeline, or for the last shape with launches.
        """
        device, last = self.step.device, None
        too_large: list[AnyBatch] = []
        compiling: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if kernels.runs_on(device):
            compilation = importlib.import_module("econmt_ops.backends.triton.compilation")
            compiling = compilation.compiling_only(device)
        with compiling as compiler:
            for batch, implementations in batches:
                key = self._key(batch, implementations)
                if key in self._graphs.warm:
                    continue
                try:
                    run = self._inputs(batch), implementations
                    self._warm_up(*run)
                except RuntimeError as error:
                    # The other stages of a pipeline wait for this one.
                    if self.step.communicator.stages > 1 or not is_out_of_memory(error):
                        raise
                    too_large.append(batch)
                    continue
                last = run
                self._graphs.warm.add(key)
        if compiler is not None and compiler.failed:
            self._graphs.warm.clear()  # the first run of a shape raises the error, which its capture would hide
        if last is not None:
            # Once with launches, in autograd's own thread, which needs handles of libraries, too.
            self._warm_up(*last)
        # Otherwise the memory of the warm-up would be held beside the pool for the whole run.
        torch.cuda.empty_cache()
        return too_large

    def capture(self, batch: AnyBatch, implementations: Implementations | None = None) -> None:
        """Captures the graph for batches of this shape if it does not exist yet; the largest shape should come first.

        Raises:
            RuntimeError: There is too little memory.
        """
        self._find_all([batch], [implementations or self.step.implementations], ends=False)

    def accumulate(self) -> None:
        """Captures batches that add to the gradients of an update from now on, and releases the graphs there are."""
        self.release()
        self._graphs.warm.clear()
        self._several = self.step.keeps_gradients = True

    def release(self) -> None:
        """Destroys all graphs, even those still referenced elsewhere, and frees their memory and that of gradients."""
        self.step.optimizer.zero_grad(set_to_none=True)  # the next capture makes them
        self._graphs.release()

    def _find_all(
        self, batches: Sequence[AnyBatch], implementations: Sequence[Implementations], *, ends: bool
    ) -> list[CapturedGraph | None]:
        """Returns a graph for each batch and, if ``ends``, for the end of an update; None if it cannot be captured.

        All ranks have graphs of the same shapes afterwards, also after an error, since an eager step makes other
        exchanges than a graph; ranks exchange something only if there are new ones.
        """
        cache, communicator = self._graphs, self.step.communicator
        known, refused = set(cache.graphs), set(cache.refused)
        releases, graphs = -1, list[CapturedGraph | None]()
        try:
            # A batch may have made room by releasing the graphs of those before it.
            while releases != cache.releases:
                releases, graphs = cache.releases, []
                for number, pair in enumerate(zip(batches, implementations, strict=True)):
                    self.step.number = number
                    graphs.append(self._find(*pair))
            self.step.number = None
            if ends:
                # Before replays, so that a capture that fails has changed nothing.
                note = partial(self._refused, None)
                graphs.append(cache.find(_UPDATE, lambda: self._run_update, note, makes_room=False))
            if cache.graphs.keys() == known and cache.refused == refused:
                return graphs
            self.step.agree()
        except RuntimeError:
            if communicator.size > 1:
                cache.keep(known)
                cache.refused = refused
            raise
        lacking = communicator.all_reduce_max(*(int(graph is None) for graph in graphs))
        for lacks, batch, how in itertools.zip_longest(lacking, batches, implementations):
            key = _UPDATE if batch is None else self._key(batch, how)
            if lacks and key not in cache.refused:
                cache.refused.add(key)
                self._refused(batch, "another rank cannot capture them")
        return [None if lacks else graph for graph, lacks in zip(graphs, lacking, strict=True)]

    def _find(self, batch: AnyBatch, implementations: Implementations) -> CapturedGraph | None:
        """Returns the graph of a batch, captured if needed; None if its shape cannot be captured.

        A first run of the shape takes memory beside that of the graphs; if there is none, all graphs are released. With
        several ranks they are kept, since all ranks capture in the same order.
        """
        key, alone = self._key(batch, implementations), self.step.communicator.size == 1
        prepare, note = partial(self._prepare, batch, implementations), partial(self._refused, batch)
        return self._graphs.find(key, prepare, note, makes_room=alone)

    def _refused(self, batch: AnyBatch | None, reason: str) -> None:
        """Reports why batches of this shape, or updates from several batches, run eagerly from now on."""
        if self._note is not None:
            what = "updates from several batches" if batch is None else f"batches of {batch.size_text}"
            self._note(f"{what} run without a CUDA graph, which is slower: {reason}")

    def _key(self, batch: AnyBatch, implementations: Implementations) -> Hashable:
        return implementations, batch.positions, self._capacity(batch)

    def _capacity(self, batch: AnyBatch) -> int:
        """Returns the number of rows of the graph that a batch runs in."""
        rows = len(batch.indices)
        return rows if self._most_rows is None else max(rows, self._most_rows(batch))

    def _inputs(self, batch: AnyBatch) -> _Inputs:
        inputs = _Inputs(batch, self._capacity(batch), self.step.device)
        inputs.fill(batch, batch.target_tokens)
        return inputs

    def _prepare(self, batch: AnyBatch, implementations: Implementations) -> Callable[[], object]:
        """Returns the function to capture for a batch, after its first run; it returns its inputs and its result."""
        step, inputs, key = self.step, self._inputs(batch), self._key(batch, implementations)
        step.prepare(gradients=self._several)
        if key not in self._graphs.warm:
            self._warm_up(inputs, implementations)
            self._graphs.warm.add(key)
            torch.cuda.empty_cache()

        def run() -> tuple[_Inputs, StepResult | None]:
            if self._several:
                self._total += step.accumulate(inputs.batch, inputs.tokens, implementations, _free_workspaces)
                return inputs, None
            try:
                result = step.run([inputs.batch], inputs.tokens, [implementations], _free_workspaces)
            except RuntimeError:
                if step.backward_updates is not None:
                    step.backward_updates.started = False  # a capture executes nothing
                raise
            step.clear()
            return inputs, result

        return run

    def _run_update(self) -> tuple[None, StepResult]:
        """Ends an update from several batches: clipping, update, and zeroing of the gradients."""
        result = self.step.finish_and_update(self._total.clone())
        self.step.clear()
        self._total.zero_()
        return None, result

    def _warm_up(self, inputs: _Inputs, implementations: Implementations) -> None:
        """Runs forward and backward pass once before capture, see `GraphCache.warming_up`.

        Seeds, carried states and gradients, which are zeros if updates consist of several batches, are restored
        afterwards; parameters are not touched.
        """
        step = self.step
        parameters = step.parameters
        seeds, gradients = step.random_state(), [parameter.grad for parameter in parameters]
        carried = step.carried()
        for parameter in parameters if not self._several else ():  # a second set would take memory
            parameter.grad = None
        try:
            updates = None if self._several else step.backward_updates
            drops = contextlib.nullcontext() if updates is None else updates.discarding()
            with self._graphs.warming_up(), drops:
                step.accumulate(inputs.batch, inputs.tokens, implementations, _free_workspaces)
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            if self._several:
                step.clear()
            step.set_random_state(seeds)
            step.set_carried(carried)
        torch.cuda.synchronize(step.device)
