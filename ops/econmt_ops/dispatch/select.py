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
from econmt_ops.dispatch.rule import MODE, CallRequest, Candidate, Problem, can_run, is_transformed
from econmt_ops.dispatch.session import current_session, remembered
from econmt_ops.dispatch.traits import Implementation

__all__ = ["Candidate", "Problem", "run"]

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
    op with stash levels then uses its fastest level unless one is given. Small calls, and those inside a transform of
    torch.func or forward-mode differentiation, run the reference. A named implementation uses its own default level.

    Args:
        problem: Description of the call.
        call: Runs a candidate, its first argument, with the problem's arguments as further arguments.
        available: Implementations of the op by name, from `econmt_ops.dispatch.traits.implementations`.
        implementation: "auto" or a name in `available`.
        stash: Requested stash level: "auto" or one of `STASHES`.
        options: Options with which every implementation can run, the rule's option first; empty if there are none.

    Returns:
        The result of ``call``.

    Raises:
        ValueError: If the implementation or stash level is unknown, or this machine cannot run the implementation; the
            message lists the available ones.
    """
    request = CallRequest(available, implementation, stash, options or [{}])
    if implementation != "auto":
        _check_named(problem, request)
    if stash != "auto" and stash not in STASHES:
        levels = ", ".join(("auto", *STASHES))
        raise ValueError(f"{problem.op}: unknown stash level {stash!r}; available: {levels}")
    candidate = request.by_rule(problem)
    if not torch.compiler.is_compiling() and (implementation == "auto" or len(request.options) > 1):
        candidate = _measured(problem, call, request, candidate)
    return call(candidate, *problem.arguments)


def _check_named(problem: Problem, request: CallRequest) -> None:
    """Raises ValueError if the requested implementation does not exist or this machine cannot run it."""
    available, name = request.available, request.implementation
    named = available.get(name)
    if named is not None and (
        named.traits.is_available() or (MODE.device and named.traits.can_be_estimated())
    ):
        return
    names = ", ".join(("auto", *(each.name for each in available.values() if each.traits.is_available())))
    reason = "unknown implementation" if named is None else "this machine cannot run the implementation"
    raise ValueError(f"{problem.op}: {reason} {name!r}; available: {names}")


def _measured(
    problem: Problem, call: Callable[..., Any], request: CallRequest, default: Candidate
) -> Candidate:
    """Returns the rule's candidate, ``default``, or one that was measured to be faster."""
    session = current_session()
    if (
        MODE.rules_only
        or is_transformed()
        or any(isinstance(tensor, FakeTensor) for tensor in tensors_of(problem.arguments))
    ):
        return default
    where = machine(problem.device) if problem.device.type != "meta" else ""
    if not where or (session is None and not remembered(where)):
        return default
    candidates: dict[str, Candidate] = {}
    for implementation in request.available.values():
        if request.implementation == implementation.name or (
            request.implementation == "auto"
            and can_run(implementation.traits, problem.device.type, problem.dtype)
            and implementation.traits.serves(problem.sizes, problem.detail)
        ):
            for candidate in _variants(implementation, problem, request):
                candidates.setdefault(candidate.label, candidate)
    candidates[default.label] = default
    known = remembered(where).get(problem.key, {})
    if session is None:
        records = {name: record for name, record in known.items() if name in candidates}
        return candidates[decide(records, default.label)] if default.label in records else default
    return candidates[session.choose(problem, call, candidates, default.label, known, where)]


def _variants(implementation: Implementation, problem: Problem, request: CallRequest) -> list[Candidate]:
    """Returns an implementation with each of its options; with every stash level if a byte limit is to be met."""
    session, gradients = current_session(), problem.keeps_gradients
    limited = session is not None and session.byte_limit is not None
    levels = [request.stash]
    if request.stash == "auto" and limited and implementation.traits.takes_stash and gradients:
        levels = list(STASHES)
    return [
        request.candidate(implementation, gradients, level, option)
        for level in levels
        for option in request.options
    ]
