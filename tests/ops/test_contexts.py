"""Contexts put back what was there before them, also after an error and inside of each other."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import _signals_wait
from econmt_ops.core.loops import shortened, steps_of
from econmt_ops.core.scopes import current_layer, layer
from econmt_ops.dispatch.rule import MODE, captured, rules_only
from econmt_ops.dispatch.session import current_session, measuring


@contextmanager
def repeating(times: int) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda: shortened(repeating), lambda: len([*steps_of(range(9))])),
        (lambda: rules_only("cuda"), lambda: (MODE.rules_only, MODE.device)),
        (captured, lambda: MODE.captured),
        (lambda: measuring(remember=False), current_session),
        (native.without, lambda: native.off),
        (lambda: layer("decoder"), current_layer),
        (_signals_wait, lambda: signal.getsignal(signal.SIGINT)),
    ],
    ids=["shortened", "rules_only", "captured", "measuring", "without", "layer", "signals"],
)
def test_an_error_in_a_context_puts_back_what_was_there(
    make: Callable[[], AbstractContextManager[object]], state: Callable[[], object]
) -> None:
    check_put_back(make, state)


def check_put_back(
    make: Callable[[], AbstractContextManager[object]], state: Callable[[], object], *, nested: bool = True
) -> None:
    """Fails unless a context, and if ``nested`` one inside of it, put back a state after an error."""
    before = state()

    def fail(nested: bool) -> None:
        inside = state()
        assert inside != before
        if nested:
            with pytest.raises(KeyboardInterrupt), make():
                fail(False)
            assert state() == inside
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), make():
        fail(nested)
    assert state() == before
