"""Ledgers and reports made by hand, so that every figure of a table or a page is known."""

from __future__ import annotations

from econmt.engine.precision import NAMED
from econmt.estimate.profiling import Profile
from econmt.estimate.report.report import Report
from econmt.estimate.techniques import Technique
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt_memory.measure.ledger import Ledger, Moment, TensorAtPeak

SHAPE = Shape(4, 30, 20)


def make_ledger(scale: int = 1, *, timed: bool = True) -> Ledger:
    """A ledger whose feature maps are ``scale`` times some megabytes; weights do not depend on it."""
    ledger = Ledger(tokens=80, flops=3_000_000)
    ledger.entries.update(
        {
            ("feature maps", "attention"): 6_000_000 * scale,
            ("feature maps", "decoder"): 2_000_000 * scale,
            ("weights", "decoder"): 1_500_000,
            ("weights", "output"): 500_000,
            ("workspace", "attention"): 1_000_000,
            ("other", "other"): 12_345,
        }
    )
    ledger.peak = ledger.entries.total()
    ledger.stash.update({"attention": 6_000_000 * scale, "decoder": 3_000_000 * scale})
    ledger.largest = [
        TensorAtPeak(6_000_000, (4, 30, 128), "float32", "feature maps", "attention", "aten.tanh")
    ] * scale
    ledger.largest.append(TensorAtPeak(1_500_000, (), "float32", "weights", "decoder", ""))
    half = ledger.peak // 2
    ledger.timeline = [
        Moment(0.0, half, "forward"),
        Moment(2.0, half + 1, "forward"),
        Moment(4.0, half + 2, "backward"),
        Moment(6.0, ledger.peak, "backward"),
        Moment(8.0, half + 3, "optimizer"),
        Moment(10.0, half, "optimizer"),
    ]
    if timed:
        ledger.milliseconds = {
            ("forward", "attention"): 3.0,
            ("forward", "decoder"): 1.0,
            ("backward", "attention"): 4.0,
            ("optimizer", "other"): 2.0,
        }
        ledger.seconds = 0.01 * scale
        ledger.peak_flops_per_second = 4.0e9
    return ledger


def make_profile(name: str, scale: int, *, timed: bool = True, rows: int | None = None) -> Profile:
    """A profile; with ``rows`` its bytes are estimated and its times are those of so many rows."""
    ops = Implementations("recompute", "reference")
    if name.startswith("reference"):
        ops = Implementations.definitions()
    technique = Technique(name, ops, NAMED["bfloat16" if name.endswith("bfloat16") else "float32"])
    ledger = make_ledger(scale, timed=timed and rows is None)
    if rows is not None:
        times = make_ledger(scale)
        return Profile(technique, SHAPE, ledger, False, times, SHAPE._replace(rows=rows))
    if not timed:
        return Profile(technique, SHAPE, ledger, False)
    return Profile(technique, SHAPE, ledger, True, ledger, SHAPE)


def make_report(*profiles: Profile, recipe: str = "sample") -> Report:
    """A report of some profiles."""
    return Report(
        recipe=recipe,
        command=f"econmt profile {recipe}",
        shape=SHAPE,
        vocabulary=(1234, 56),
        device="cpu",
        how="Bytes and times: counted on fingers.",
        notes=["Shape: as it came."],
        machine={"processor": "abacus", "torch": "2.13.0"},
        profiles=list(profiles),
    )
