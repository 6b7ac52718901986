"""Selects the implementation of an op and runs it: by measurements of this shape on this machine, or by the rule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from econmt_ops.core.chunks import STASHES
from econmt_ops.dispatch.device_limits import on_gpu_of
from econmt_ops.dispatch.measurements import decide, machine
from econmt_ops.dispatch.rule import MODE, Problem, can_run, device_of, is_transformed, rule
from econmt_ops.dispatch.session import current_session, remembered
from econmt_ops.dispatch.traits import Candidate, implementations_of

__all__ = ["Candidate", "Problem", "run"]

_Result = TypeVar("_Result")


def run(
    problem: Problem,
    call: Callable[..., _Result],
    implementation: str,
    *,
    stash: str = "auto",
    options: Sequence[Mapping[str, str]] = (),
) -> _Result:
    """Runs an op with the requested or the selected implementation, and returns its result.

    "auto" selects the fastest measured candidate, or without measurements that of `econmt_ops.dispatch.rule.rule`; an
    op with stash levels then uses its fastest level unless one is given. Small calls, and those inside a transform of
    torch.func or forward-mode differentiation, run the reference. A named implementation uses its own default level.

    Args:
        problem: Description of the call.
        call: Runs a candidate, its first argument, with the problem's arguments as further arguments.
        implementation: "auto" or the name of an implementation of the op.
        stash: Requested stash level: "auto" or one of `STASHES`.
        options: Options with which every implementation can run, the rule's option first; empty if there are none.

    Raises:
        ValueError: If the implementation or stash level is unknown, or this machine cannot run the implementation.
    """
    choice = _Choice(problem, implementation, stash, options or [{}])
    if implementation != "auto":
        choice.check_name()
    if stash != "auto" and stash not in STASHES:
        levels = ", ".join(("auto", *STASHES))
        raise ValueError(f"{problem.op}: unknown stash level {stash!r}; available: {levels}")
    candidate = choice.by_rule()
    if torch.compiler.is_compiling():
        return call(candidate, *problem.arguments)
    with on_gpu_of([problem.device]):
        if implementation == "auto" or len(choice.options) > 1:
            candidate = choice.by_measurements(candidate, call)
        return call(candidate, *problem.arguments)


class _Choice(NamedTuple):
    """Choice among an op's implementations; see the arguments of :func:`run`."""

    problem: Problem
    implementation: str
    stash: str
    options: Sequence[Mapping[str, str]]

    @property
    def available(self) -> Mapping[str, Candidate]:
        """Implementations of the op by name."""
        return implementations_of(self.problem.op)

    def check_name(self) -> None:
        """Raises ValueError if the requested implementation does not exist or this machine cannot run it."""
        named = self.available.get(self.implementation)
        if named is not None and named.traits.is_available():
            return
        able = [each.name for each in self.available.values() if each.traits.is_available()]
        reason = "unknown implementation" if named is None else "this machine cannot run the implementation"
        names = ", ".join(("auto", *able))
        raise ValueError(f"{self.problem.op}: {reason} {self.implementation!r}; available: {names}")

    def _candidate(self, chosen: Candidate, level: str, option: Mapping[str, str]) -> Candidate:
        """Returns an implementation with an option, and a stash level, of which "auto" is the default.

        An implementation that the request names uses its own default level, others the fastest one.
        """
        if self.implementation == level == "auto" and self.problem.keeps_gradients:
            # Only a model's training and its estimate use rules alone.
            level = chosen.traits.stash_in_model(self.problem.dtype) if MODE.rules_only else "gates"
        stash = {} if not chosen.traits.takes_stash or level == "auto" else {"stash": level}
        return chosen._replace(options={**option, **stash})

    def by_rule(self) -> Candidate:
        """Returns the candidate that runs where no measurements exist."""
        problem, name = self.problem, self.implementation
        # A model's training and its estimate use rules only, and one implementation for all shapes.
        is_light = problem.is_light and self.stash == "auto" and not MODE.rules_only
        if name == "auto" and (is_light or is_transformed()):
            name = next(iter(self.available))
        elif name == "auto":
            kind, gradients = device_of(problem.like), problem.keeps_gradients
            name = rule(problem.op, kind, problem.dtype, gradients=gradients)
        return self._candidate(self.available[name], self.stash, self.options[0])

    def by_measurements(self, default: Candidate, call: Callable[..., Any]) -> Candidate:
        """Returns the rule's candidate, ``default``, or one that was measured to be faster."""
        problem, session = self.problem, current_session()
        has_values = problem.device.type != "meta" and not isinstance(problem.like, FakeTensor)
        if MODE.rules_only or is_transformed() or not has_values:
            return default
        where = machine(problem.device)
        if session is None and not remembered(where):
            return default
        limited = session is not None and session.byte_limit is not None and problem.keeps_gradients
        levels = STASHES if limited and self.stash == "auto" else (self.stash,)
        candidates: dict[str, Candidate] = {}
        for each in self.available.values():
            if self.implementation == each.name or (
                self.implementation == "auto" and can_run(each.traits, problem.device.type, problem.dtype)
            ):
                for level, option in itertools.product(levels, self.options):
                    candidate = self._candidate(each, level, option)
                    candidates.setdefault(candidate.label, candidate)
        candidates[default.label] = default
        known = remembered(where).get(problem.key, {})
        records = {name: record for name, record in known.items() if name in candidates}
        if session is None:
            return candidates[decide(records, default.label)] if default.label in records else default
        return candidates[session.choose(problem, call, candidates, default.label, records, where)]
