"""Selects the implementation of an op and runs it.

For each call with "auto", `run` uses the measurements of this shape on this machine, or else the rule. Measurements are
taken on request only:

    with econmt_ops.dispatch.session.measuring():
        model(batch)            # every op at "auto" times its candidates and stores the times
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from econmt_ops.core.chunks import STASHES
from econmt_ops.core.weights import tensors_of
from econmt_ops.dispatch.measurements import decide, machine
from econmt_ops.dispatch.rule import MODE, Candidate, Problem, ruled, with_stash
from econmt_ops.dispatch.session import current_session, remembered
from econmt_ops.dispatch.traits import Implementation, implementations

__all__ = ["Candidate", "Problem", "implementations", "run"]

_Result = TypeVar("_Result")


def run(
    problem: Problem,
    call: Callable[..., _Result],
    available: Mapping[str, Implementation],
    implementation: str,
    *,
    stash: str = "auto",
    options: Sequence[Mapping[str, str]] = (),
) -> _Result:
    """Runs an op with the requested or the selected implementation.

    "auto" selects the fastest measured candidate, or without measurements that of `econmt_ops.dispatch.rule.rule`; an
    op with stash levels then uses its fastest level unless one is given. Small calls run the reference. A named
    implementation uses its own default level.

    Args:
        problem: Description of the call.
        call: Runs a candidate, its first argument, with the problem's arguments as further arguments.
        available: Implementations of the op by name, from `implementations`.
        implementation: "auto" or a name in `available`.
        stash: Requested stash level: "auto" or one of `STASHES`.
        options: Options with which every implementation can run, the rule's option first; empty if there are none.

    Returns:
        The result of ``call``.

    Raises:
        ValueError: If the implementation or stash level is unknown, or this machine cannot run the implementation; the
            message lists the available ones.
    """
    op = problem.op
    if implementation != "auto":
        _check_named(problem, available, implementation)
    if stash != "auto" and stash not in STASHES:
        raise ValueError(f"{op}: unknown stash level {stash!r}; available: {', '.join(('auto', *STASHES))}")
    default = ruled(problem, available, implementation, stash, options)
    if (implementation != "auto" and len(options) < 2) or torch.compiler.is_compiling():
        return call(default, *problem.arguments)
    chosen = _choose(problem, call, available, implementation, stash, options, default)
    return call(chosen, *problem.arguments)


def _check_named(problem: Problem, available: Mapping[str, Implementation], name: str) -> None:
    found = available.get(name)
    if found is not None and (found.traits.is_available() or (MODE.device and found.traits.is_installed)):
        return
    names = ", ".join(("auto", *(each.name for each in available.values() if each.traits.is_available())))
    problem_with_it = (
        "unknown implementation" if found is None else "this machine cannot run the implementation"
    )
    raise ValueError(f"{problem.op}: {problem_with_it} {name!r}; available: {names}")


def _choose(
    problem: Problem,
    call: Callable[..., Any],
    available: Mapping[str, Implementation],
    implementation: str,
    stash: str,
    options: Sequence[Mapping[str, str]],
    default: Candidate,
) -> Candidate:
    """Returns the rule's candidate, or one that was measured to be faster."""
    session = current_session()
    if MODE.rules_only or any(isinstance(tensor, FakeTensor) for tensor in tensors_of(problem.arguments)):
        return default
    where = machine(problem.device) if problem.device.type != "meta" else ""
    if not where or (session is None and not remembered(where)):
        return default
    found: dict[str, Candidate] = {}
    for each in available.values():
        if implementation == each.name or (implementation == "auto" and _serves(each, problem)):
            for candidate in _levels(each, problem, implementation, stash, options):
                found.setdefault(candidate.label, candidate)
    found[default.label] = default
    known = remembered(where).get(problem.key, {})
    if session is None:
        records = {name: record for name, record in known.items() if name in found}
        return found[decide(records, default.label)] if default.label in records else default
    return found[session.choose(problem, call, found, default.label, known, where)]


def _serves(implementation: Implementation, problem: Problem) -> bool:
    traits = implementation.traits
    return (
        traits.runs_on(problem.device.type, problem.dtype)
        and (traits.capturable or not MODE.captured)
        and traits.is_available()
        and traits.serves(problem.sizes, problem.detail)
    )


def _levels(
    implementation: Implementation,
    problem: Problem,
    asked: str,
    stash: str,
    options: Sequence[Mapping[str, str]],
) -> list[Candidate]:
    """Returns an implementation with each of its options; with every stash level if a byte limit is to be met."""
    session = current_session()
    limited = session is not None and session.byte_limit is not None
    levels = [stash]
    if stash == "auto" and limited and implementation.traits.takes_stash and problem.keeps_gradients:
        levels = list(STASHES)
    gradients = problem.keeps_gradients
    return [
        with_stash(implementation, asked, level, others, gradients)
        for level in levels
        for others in options or [{}]
    ]
