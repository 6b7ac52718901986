"""Chooses which implementation of an op runs.

Every op lives in a package of its own, and each module of it named in `NAMES` that defines a function with
the op's name is one implementation. Adding an implementation is adding such a file: nothing else has to
change. All implementations of an op take the same arguments, already validated and cast by the op's public
function.

What "auto" means is decided for each call by `run`: by what was measured at this shape on this machine, or else by a
rule. Nothing is measured unless asked for:

    with econmt_ops.dispatch.select.measuring():
        model(batch)            # every op that is left at "auto" times its candidates, and remembers them
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from econmt_ops.core.chunks import STASHES
from econmt_ops.core.weights import tensors_of
from econmt_ops.dispatch.isolation import counting_bytes, detached
from econmt_ops.dispatch.measurements import Measurement, Record, Store, decide, machine
from econmt_ops.dispatch.timing import alternate, compared, synchronizer

NAMES = ("reference", "recompute", "compiled", "triton")

RECURRENT = ("lstm", "bidirectional_lstm", "attentional_lstm")
"""The ops that take a stash level."""

_FASTEST_STASH = "gates"

_LAUNCH_BOUND = ("cuda",)
"""Devices on which launching the many small kernels of a recomputing loop takes longer than running them.

Measured on an H200 (docs/results.md): a step of the iwslt recipe takes twice the reference's time with all recurrent
ops recomputed, though these keep a fifth.
"""

_SAMPLES = 20
"""Samples at which a candidate is known well enough."""

_LEAST_SAMPLES = 1
"""Samples beside the first call without which the rule holds: one tells more than none where calls take long."""

_Result = TypeVar("_Result")


def implementations(package: str, op: str) -> dict[str, Callable[..., Any]]:
    """Collects the implementations of an op that a package holds.

    A module whose needs are not met on this machine (a compiler that is not installed, say) defines
    `is_available() -> bool` and is left
    out when that returns False; it must still be importable.

    Args:
        package: the package's full name, `econmt_ops.lstm` for example.
        op: the op's name, which is the name of the function in every implementation.

    Returns:
        The functions by implementation name, in the order of `NAMES`.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in NAMES:
        if importlib.util.find_spec(f"{package}.{name}") is None:
            continue
        module = importlib.import_module(f"{package}.{name}")
        is_available = getattr(module, "is_available", None)
        if hasattr(module, op) and (is_available is None or is_available()):
            found[name] = getattr(module, op)
    return found


class Candidate(NamedTuple):
    """A way to run an op: an implementation's name, its function, and options beside the op's arguments."""

    name: str
    function: Callable[..., Any]
    options: dict[str, str]

    @property
    def label(self) -> str:
        """The name and the options' values: recompute/gates."""
        return "/".join((self.name, *self.options.values()))


class Problem(NamedTuple):
    """What a call of an op is about.

    Attributes:
        op: its name.
        arguments: that a gradient may be asked of, tensors in nested tuples; the first tensor's device is the op's.
        dtype: the compute type.
        sizes: by letter, as `Shapes` learns them.
        detail: what else changes the work: the number of layers, the kind of attention.
        is_light: whether the reference keeps little and is known to be faster.
    """

    op: str
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    sizes: Mapping[str, int]
    detail: str = ""
    is_light: bool = False

    @property
    def device(self) -> torch.device:
        """Where the op runs."""
        return tensors_of(self.arguments)[0].device

    @property
    def keeps_gradients(self) -> bool:
        """Whether autograd will keep something for a backward pass."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(self.arguments))

    @property
    def key(self) -> str:
        """Tells problems apart whose best candidates may differ."""
        letters = [f"{name}={int(size)}" for name, size in self.sizes.items() if "+" not in name]
        kind = "backward" if self.keeps_gradients else "forward"
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join((self.op, *letters, *([self.detail] if self.detail else []), dtype, kind))


def run(
    problem: Problem,
    call: Callable[..., _Result],
    available: Mapping[str, Callable[..., Any]],
    implementation: str,
    *,
    stash: str = "auto",
    options: Sequence[Mapping[str, str]] = (),
) -> _Result:
    """Runs an op.

    "auto" is the fastest candidate where they were measured. Elsewhere it is "recompute" where a backward pass will
    follow, and "reference" otherwise or where there is no other; a recurrent op then keeps its gates unless told
    otherwise: it is about as fast as the reference and keeps less. On a GPU it is not as fast, so there recurrent ops
    are "reference", as is what is light. Named implementations keep what they keep by themselves.

    Args:
        problem: what the call is about.
        call: runs a candidate, its first argument, with the problem's arguments, the others.
        available: the functions by name, as `implementations` returns them.
        implementation: "auto" or one of the names in `available`.
        stash: the level that a recurrent op was given: "auto" or one of `STASHES`.
        options: the options with which every implementation may run, the one of the rule first; none: there are none.

    Raises:
        ValueError: no implementation or no stash level has this name; the message names those there are.
    """
    op = problem.op
    if implementation != "auto" and implementation not in available:
        names = ", ".join(("auto", *available))
        raise ValueError(f"{op}: unknown implementation {implementation!r}; available: {names}")
    if stash != "auto" and stash not in STASHES:
        raise ValueError(f"{op}: unknown stash level {stash!r}; available: {', '.join(('auto', *STASHES))}")
    default = _rule(problem, available, implementation, stash, options)
    if (implementation != "auto" and len(options) < 2) or torch.compiler.is_compiling():
        return call(default, *problem.arguments)
    chosen = _choose(problem, call, available, implementation, stash, options, default)
    return call(chosen, *problem.arguments)


def _rule(
    problem: Problem,
    available: Mapping[str, Callable[..., Any]],
    implementation: str,
    stash: str,
    options: Sequence[Mapping[str, str]],
) -> Candidate:
    """What runs where nothing is measured."""
    name = implementation
    if name == "auto":
        recomputes = problem.keeps_gradients and rule(problem.op, _device_type(problem)) == "recompute"
        # What follows rules alone, a model's run or its estimate, has one implementation for all of its shapes.
        recomputes = recomputes and not (problem.is_light and stash == "auto" and not _MODE.rules_only)
        name = "recompute" if "recompute" in available and recomputes else "reference"
    level = _level(problem, implementation, stash)
    return Candidate(name, available[name], _options(name, level, options[0] if options else {}))


def rule(op: str, device: str) -> str:
    """What "auto" means where a backward pass will follow and nothing is measured.

    Args:
        op: its name.
        device: the type of the device, "cpu" or "cuda".
    """
    return "reference" if op in RECURRENT and device in _LAUNCH_BOUND else "recompute"


def _device_type(problem: Problem) -> str:
    return _MODE.device or problem.device.type


def _level(problem: Problem, implementation: str, stash: str) -> str:
    """What an op that recomputes keeps."""
    free = implementation == "auto" and stash == "auto" and problem.op in RECURRENT
    return _FASTEST_STASH if free else stash


def _options(name: str, stash: str, others: Mapping[str, str]) -> dict[str, str]:
    # The reference keeps what autograd keeps, whatever the level.
    return {**others} if stash == "auto" or name == "reference" else {**others, "stash": stash}


def _choose(
    problem: Problem,
    call: Callable[..., Any],
    available: Mapping[str, Callable[..., Any]],
    implementation: str,
    stash: str,
    options: Sequence[Mapping[str, str]],
    default: Candidate,
) -> Candidate:
    """The rule, or what was measured to be faster."""
    session = _MODE.session
    if _MODE.rules_only or any(isinstance(tensor, FakeTensor) for tensor in tensors_of(problem.arguments)):
        return default
    if problem.device.type == "meta" or (session is None and not _remembered(machine(problem.device))):
        return default
    names = [name for name in available if implementation in ("auto", name)]
    levels = [_level(problem, implementation, stash)]
    if session is not None and session.byte_limit is not None and stash == "auto" and problem.op in RECURRENT:
        levels = list(STASHES)
    found: dict[str, Candidate] = {}
    for name in names:
        # What was not named is not known to keep gates where no gradient is kept, and needs not.
        for level in levels if problem.keeps_gradients else ["auto"]:
            for others in options or [{}]:
                candidate = Candidate(name, available[name], _options(name, level, others))
                found.setdefault(candidate.label, candidate)
    found[default.label] = default
    return _choose_among(problem, call, found, default)


def _choose_among(
    problem: Problem, call: Callable[..., Any], found: Mapping[str, Candidate], default: Candidate
) -> Candidate:
    where, key, session = machine(problem.device), problem.key, _MODE.session
    remembered = _remembered(where).get(key, {})
    if session is None:
        records = {name: record for name, record in remembered.items() if name in found}
        return found[decide(records, default.label)] if default.label in records else default
    return found[session.choose(problem, call, found, default.label, remembered, where)]


@functools.cache
def _remembered(where: str) -> dict[str, dict[str, Record]]:
    """The records of this machine: read from the file once, then added to by sessions."""
    return Store().load(where)


def forget() -> None:
    """Reads the file of measurements anew when it is needed next."""
    _remembered.cache_clear()


class Session:
    """Measures every op that is left at "auto"; see `measuring`.

    Attributes:
        measurements: of every problem met, by key.
        samples: seconds of each call, by key and candidate; the n-th ones of a key were taken one after the other.
        byte_limit: see `measuring`.
        seconds: spent on measuring so far.
    """

    def __init__(
        self,
        seconds: float,
        byte_limit: int | None,
        compiled: bool,
        only: Collection[str] | None,
        store: Store | None,
        share: float = 1.0,
    ) -> None:
        self.measurements: dict[str, Measurement] = {}
        self.samples: dict[str, dict[str, tuple[float, ...]]] = {}
        self.byte_limit = byte_limit
        self.seconds = 0.0
        self._allowed = seconds
        self._compiled = compiled
        self._only = only
        self._store = store
        self._share = share
        self._fresh: dict[str, dict[str, dict[str, Record]]] = {}

    def choose(
        self,
        problem: Problem,
        call: Callable[..., Any],
        found: Mapping[str, Candidate],
        rule: str,
        remembered: Mapping[str, Record],
        where: str,
    ) -> str:
        """The label of the candidate to run; measures if this has not been measured here."""
        key = problem.key
        known = self.measurements.get(key)
        if known is not None:
            self.measurements[key] = known._replace(calls=known.calls + 1)
            return known.choice(self.byte_limit)
        records = {name: record for name, record in remembered.items() if name in found}
        wanted = {name for name in found if self._compiled or found[name].name != "compiled"}
        if self._only is not None:
            wanted &= set(self._only)
        if self._store is None or not wanted <= records.keys():
            timed = self._measure(problem, call, {name: found[name] for name in found if name in wanted})
            if timed is None:
                return rule
            records = {**records, **timed}
            if self._store is not None:
                self._fresh.setdefault(where, {})[key] = records
        self.measurements[key] = Measurement(problem.op, key, rule, records)
        return self.measurements[key].choice(self.byte_limit)

    def _measure(
        self, problem: Problem, call: Callable[..., Any], found: Mapping[str, Candidate]
    ) -> dict[str, Record] | None:
        """The records of candidates; None if time is up."""
        left = self._allowed - self.seconds
        if left <= 0:
            return None
        began = time.perf_counter()
        sizes: dict[str, int] = {}
        compiling: dict[str, float] = {}
        # Cut off from what made them: the backward pass must end at the op's arguments.
        alone = problem._replace(arguments=detached(problem.arguments))

        def once(candidate: Candidate) -> None:
            if candidate.label in sizes:
                _backward(alone, call(candidate, *alone.arguments))
                return
            with counting_bytes(tensors_of(alone.arguments)) as kept:
                result = call(candidate, *alone.arguments)
            sizes[candidate.label] = sum(kept.values())
            _backward(alone, result)

        functions = {name: functools.partial(once, found[name]) for name in found}
        # What an op calls inside is decided by the rule, or measurements would be nested.
        with rules_only():
            for name, candidate in found.items():
                if candidate.name == "compiled":
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
                drop=self._only is None,
                fits=self._fits(sizes),
                enough=self._share * left,
            )
        self.seconds += time.perf_counter() - began
        if timings is None:
            return None
        samples = {name: timing.samples for name, timing in timings.items()}
        self.samples[problem.key] = samples
        times = compared(samples)
        return {
            name: Record(
                1e3 * times[name],
                1e3 * timing.low,
                1e3 * timing.high,
                sizes[name],
                max(0.0, compiling.get(name, timing.first) - timing.median),
            )
            for name, timing in timings.items()
        }

    def _fits(self, sizes: Mapping[str, int]) -> Callable[[str], bool]:
        """Whether a candidate keeps no more than is allowed, once it was called."""
        return lambda name: self.byte_limit is None or sizes[name] <= self.byte_limit

    def remember(self) -> None:
        """Adds what was measured to the file."""
        if self._store is None:
            return
        for where, records in self._fresh.items():
            self._store.add(where, records)
            _remembered(where).update(records)
        self._fresh = {}


def _backward(problem: Problem, result: Any) -> None:
    """If gradients are kept, the backward pass of an op's result down to its arguments."""
    if not problem.keeps_gradients:
        return
    wanted = [tensor for tensor in tensors_of(problem.arguments) if tensor.requires_grad]
    outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    # A number to differentiate, as in training: where it is given gradients, PyTorch imports modules for a second.
    total = torch.stack([(tensor * torch.ones_like(tensor)).sum(dtype=torch.float64) for tensor in outputs])
    torch.autograd.grad(total.sum(), wanted, allow_unused=True)


class _Mode(threading.local):
    """Of this thread: the session that measures, whether measurements are left aside, and whose rules hold."""

    session: Session | None = None
    rules_only: bool = False
    device: str | None = None


_MODE = _Mode()


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
    """Within it, every op that is left at "auto" times its candidates and runs the fastest.

    Forward and, if gradients are kept, backward, at the shapes that the op meets; candidates take turns, and those that
    are clearly slower are left early. Shapes that were measured on this machine before are not measured again.

    Args:
        seconds: that measuring may take in all; what is not measured by then follows the rule.
        byte_limit: what an op may keep for its backward pass: among the candidates that do, the fastest is chosen.
        compiled: also candidates that torch.compile compiles first, which may take many seconds.
        only: the labels of the candidates to time, each to the end; None: all.
        remember: read and write the file of measurements; False: measure anew and write nothing.
        share: of the time that is left, what one op at one shape may take before others have had their turn.

    Yields:
        The session, which knows what was measured.
    """
    session = Session(seconds, byte_limit, compiled, only, Store() if remember else None, share)
    before = _MODE.session
    _MODE.session = session
    try:
        yield session
    finally:
        _MODE.session = before
        session.remember()


@contextmanager
def rules_only(device: str | None = None) -> Iterator[None]:
    """Within it, "auto" follows the rule whatever was measured: the same on every machine.

    Args:
        device: the type of device whose rule to follow, for those who tell what would happen there; None: that of the
            tensors.
    """
    before = _MODE.rules_only, _MODE.device
    _MODE.rules_only, _MODE.device = True, device
    try:
        yield
    finally:
        _MODE.rules_only, _MODE.device = before
