"""Measuring sessions, in which ops at "auto" time their candidates at the shapes they meet and store the times."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from econmt_ops.core.weights import tensors_of
from econmt_ops.dispatch.measurements import Measurement, MeasurementRecord, Store
from econmt_ops.dispatch.plans import forget_plans
from econmt_ops.dispatch.rule import Problem, rules_only
from econmt_ops.dispatch.timing import alternate, compared, synchronizer
from econmt_ops.dispatch.traits import Candidate

_SAMPLES = 20
"""Number of samples after which a candidate's time is known well enough."""

_LEAST_SAMPLES = 1
"""Samples besides the first call that a measurement needs; one is better than none where calls take long."""


@functools.cache
def remembered(where: str) -> dict[str, dict[str, MeasurementRecord]]:
    """Returns the stored records of the machine ``where``; the file is read once, then sessions add to the result."""
    return Store().load(where)


def forget() -> None:
    """Clears the cached records, so that the file is read again when next needed."""
    remembered.cache_clear()
    forget_plans()


@dataclass
class Session:
    """Measuring session; see `measuring`.

    Attributes:
        measurements: Measurements of all problems met, by key.
        samples: Seconds of each call, by key and candidate; samples with equal index were taken in the same round.
        store: File of measurements, or None.
        allowed, byte_limit, compiled, only, share: Arguments of :func:`measuring`.
        seconds: Seconds spent on measuring so far.
    """

    allowed: float
    byte_limit: int | None
    compiled: bool
    only: Collection[str] | None
    store: Store | None
    share: float
    measurements: dict[str, Measurement] = field(default_factory=dict)
    samples: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    seconds: float = 0.0
    _fresh: dict[str, dict[str, dict[str, MeasurementRecord]]] = field(default_factory=dict)

    def choose(
        self,
        problem: Problem,
        call: Callable[..., Any],
        candidates: Mapping[str, Candidate],
        rule: str,
        records: dict[str, MeasurementRecord],
        where: str,
    ) -> str:
        """Returns the label of the candidate to run, after measuring those of which there are no ``records`` yet."""
        key = problem.key
        before = self.measurements.get(key)
        if before is not None:
            self.measurements[key] = before._replace(calls=before.calls + 1)
            return before.choice(self.byte_limit)
        wanted = {
            name: each
            for name, each in candidates.items()
            if (self.compiled or not each.traits.warms_up) and (self.only is None or name in self.only)
        }
        if self.store is None or not wanted.keys() <= records.keys():
            timed = self._measure(problem, call, wanted)
            if timed is None:
                return rule
            records = {**records, **timed}
            if self.store is not None:
                self._fresh.setdefault(where, {})[key] = records
        self.measurements[key] = Measurement(problem.op, key, rule, records)
        return self.measurements[key].choice(self.byte_limit)

    def _measure(
        self, problem: Problem, call: Callable[..., Any], candidates: Mapping[str, Candidate]
    ) -> dict[str, MeasurementRecord] | None:
        """Returns the records of the candidates, or None if the session's time is used up."""
        left = self.allowed - self.seconds
        if left <= 0:
            return None
        began = time.perf_counter()
        sizes: dict[str, int] = {}
        compiling: dict[str, float] = {}
        # Detached, so that the backward pass ends at the op's arguments.
        alone = problem._replace(arguments=tree_map_only(Tensor, _detached, problem.arguments))

        def once(candidate: Candidate) -> None:
            if candidate.label in sizes:
                _backward(alone, call(candidate, *alone.arguments))
                return
            with _counting_bytes(tensors_of(alone.arguments)) as kept:
                result = call(candidate, *alone.arguments)
            sizes[candidate.label] = sum(kept.values())
            _backward(alone, result)

        functions = {name: functools.partial(once, each) for name, each in candidates.items()}
        # Ops that are called inside follow the rule, or measurements would be nested.
        with rules_only():
            for name, candidate in candidates.items():
                if candidate.traits.warms_up:
                    before = time.perf_counter()
                    once(candidate)
                    compiling[name] = time.perf_counter() - before
            left -= time.perf_counter() - began
            timings = alternate(
                functions,
                left,
                synchronize=synchronizer(problem.device),
                least=_LEAST_SAMPLES,
                most=_SAMPLES,
                drop=self.only is None,
                fits=lambda name: self.byte_limit is None or sizes[name] <= self.byte_limit,
                enough=self.share * left,
            )
        self.seconds += time.perf_counter() - began
        if timings is None:
            return None
        samples = {name: timing.samples for name, timing in timings.items()}
        self.samples[problem.key] = samples
        times = compared(samples)
        return {
            name: MeasurementRecord(
                1e3 * times[name],
                # Spread of the samples around the time that is compared, which is not their median.
                1e3 * times[name] * (timing.low / timing.median),
                1e3 * times[name] * (timing.high / timing.median),
                sizes[name],
                max(0.0, compiling.get(name, timing.first) - timing.median),
            )
            for name, timing in timings.items()
        }

    def remember(self) -> None:
        """Adds what was measured to the file."""
        forget_plans()
        if self.store is None:
            return
        for where, records in self._fresh.items():
            self.store.add(where, records)
            remembered(where).update(records)
        self._fresh = {}


def _backward(problem: Problem, result: Any) -> None:
    """Runs the backward pass from an op's result to its arguments, if gradients are kept."""
    if not problem.keeps_gradients:
        return
    wanted = [tensor for tensor in tensors_of(problem.arguments) if tensor.requires_grad]
    outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    # A scalar, as in training: with explicit gradients PyTorch imports modules for a second.
    total = torch.stack([(tensor * torch.ones_like(tensor)).sum(dtype=torch.float64) for tensor in outputs])
    torch.autograd.grad(total.sum(), wanted, allow_unused=True)


def _detached(tensor: Tensor) -> Tensor:
    """Returns a leaf of the autograd graph with the same values."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def _counting_bytes(tensors: Sequence[Tensor]) -> Iterator[dict[int, int]]:
    """Records the bytes that autograd saves, by storage, without the storages of ``tensors``."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in storages:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


_SESSION: ContextVar[Session | None] = ContextVar("measuring session", default=None)


def current_session() -> Session | None:
    """Returns this thread's measuring session, or None if nothing is measured."""
    return _SESSION.get()


@contextmanager
def measuring(
    seconds: float = 2.0,
    *,
    byte_limit: int | None = None,
    compiled: bool = False,
    only: Collection[str] | None = None,
    remember: bool = True,
    share: float = 1.0,
) -> Iterator[Session]:
    """Times the candidates of every op at "auto" within the context, and runs the fastest.

    Forward and, if gradients are kept, backward passes are timed at the shapes that the op meets. Candidates take
    turns, and clearly slower ones are dropped early. Shapes that were measured on this machine before are not measured
    again.

    Args:
        seconds: Total time limit; problems that are not measured by then follow the rule.
        byte_limit: Bytes that an op may keep for its backward pass; the fastest candidate within the limit is selected.
        compiled: True to include candidates that torch.compile compiles first, which may take many seconds.
        only: Labels of the candidates to time completely; None: all candidates.
        remember: True to read and write the file of measurements; False to measure again and store nothing.
        share: Share of the remaining time that one op at one shape may take while others are still to be measured.

    Yields:
        The session, which holds the measurements.
    """
    session = Session(seconds, byte_limit, compiled, only, Store() if remember else None, share)
    before = _SESSION.set(session)
    try:
        yield session
    finally:
        _SESSION.reset(before)
        session.remember()
