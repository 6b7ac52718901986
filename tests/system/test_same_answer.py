"""However the ops are computed, training learns the same."""

from __future__ import annotations

import json
from functools import cache

import pytest

from econmt.model import Implementations
from econmt_ops.backends.compiled import has_compiler
from tests.system.golden_losses import FILE, KINDS, REFERENCE, UPDATES, curve, variants

NAMES = ["recompute", *(["compiled"] if has_compiler() else [])]
CASES = [
    pytest.param(kind, setting, marks=pytest.mark.thorough if name == "compiled" else ())
    for kind in KINDS
    for name in NAMES
    for setting in variants(kind, name)
]

FIRST = 60
"""Updates of the implementations, whose differences would grow from one to the next."""


@cache
def reference(kind: str) -> list[float]:
    return curve(kind, REFERENCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_what_it_was(kind: str) -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert set(golden) == set(KINDS)
    losses = reference(kind)
    assert len(losses) == len(golden[kind]) == UPDATES
    assert losses == pytest.approx(golden[kind], rel=1e-4)
    # The run has learnt something: a mistake in a gradient would show.
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what does not matter here
@pytest.mark.parametrize(
    ("kind", "setting"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_every_implementation_learns_what_the_reference_learns(kind: str, setting: Implementations) -> None:
    losses = curve(kind, setting, FIRST)
    assert losses == pytest.approx(reference(kind)[:FIRST], rel=1e-5)


def test_every_op_and_every_level_is_among_them() -> None:
    settings = {case.values[1] for case in CASES}
    for op in ("encoder", "decoder", "output"):
        assert REFERENCE._replace(**{op: "recompute"}) in settings
    for level in ("outputs", "attention", "cells", "gates"):
        assert Implementations.everywhere("recompute", level) in settings
    for name in NAMES:
        assert any(setting[:4] == (name,) * 4 for setting in settings)
