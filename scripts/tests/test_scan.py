"""What `python -m scripts.bench scan` times is held to float64, and its rows tell what a copy of the same bytes takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from econmt.errors import EconmtError
from econmt_ops import linear_recurrence
from econmt_ops.dispatch.timing import Timing
from scripts.bench import frame, scan
from scripts.bench.layers import Size

CPU = torch.device("cpu")
SHAPE = Size(2, 30, 5)


def test_every_implementation_that_runs_here() -> None:
    assert list(scan.scans(SHAPE, torch.float32, CPU))[:2] == ["reference", "chunk"]
    assert list(scan.scans(SHAPE, torch.float64, CPU)) == ["reference", "chunk"]


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_held_to_float64(wrong: str) -> None:
    def broken(decay: Tensor, inputs: Tensor) -> Tensor:
        factor = 1.01 if wrong == "forward" else 1.0
        outputs = factor * linear_recurrence(decay, inputs)
        if wrong == "backward":
            outputs = outputs + 0.1 * (inputs - inputs.detach())
        return outputs

    assert scan.check("right", linear_recurrence, SHAPE, torch.float32, CPU) < 2e-6
    with pytest.raises(EconmtError, match=r"bench scan: broken differs from float64 by 0\.\d+"):
        scan.check("broken", broken, SHAPE, torch.float32, CPU)


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: a copy takes one second, all else two; the loop is timed on fewer steps."""
    asked: list[list[Callable[[], object]]] = []

    def alternate(functions: dict[str, Callable[[], object]], *_: object, **__: object) -> dict[str, Timing]:
        asked.append(list(functions.values()))
        for function in functions.values():
            function()
        times = (1.0, 2.0)
        pairs = zip(functions, times, strict=True)
        return {name: Timing(time, time, time, (time,), time) for name, time in pairs}

    monkeypatch.setattr(frame, "alternate", alternate)
    monkeypatch.setattr(scan, "LOOP_STEPS", 10)
    said: list[str] = []
    rows = list(scan.rows([SHAPE], [torch.bfloat16], CPU, said.append, seconds=1.0))
    assert said[0] == "2x30x5, bfloat16, reference"
    labels = list(scan.scans(SHAPE, torch.bfloat16, CPU))
    assert [(row["pass"], row["implementation"]) for row in rows] == [
        (what, label)
        for what in ("forward", "backward", "both")
        for label in labels
        if (what, label) != ("both", scan.GIVEN_MEMORY)
    ]
    for row in rows:
        seconds = 6.0 if row["implementation"] == "reference" else 2.0
        count = {"forward": 3, "backward": 5, "both": 8}[str(row["pass"])]
        assert row["bytes"] == count * 2 * 30 * 5 * 2
        assert row["milliseconds"] == 1000 * seconds
        assert row["share of a copy"] == 1 / seconds
        assert row["GB/s"] == pytest.approx(float(row["bytes"]) / seconds / 1e9)
    copied = scan.copy_of(3, SHAPE, torch.bfloat16, CPU)()
    assert 2 * copied.nbytes == 3 * 2 * 30 * 5 * 2
