"""A report as JSON values: bytes are bytes, times are milliseconds or seconds as their names say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from econmt.estimate.fit import Fit
from econmt.estimate.profiling import Profile
from econmt.estimate.report.kernel_tables import kernels_data
from econmt.estimate.report.report import Report
from econmt.estimate.techniques import Technique
from econmt.tasks.protocol import Shape
from econmt_memory.measure.ledger import Ledger
from econmt_memory.measure.storages import PHASES
from econmt_memory.report.ledger_tables import ledger_data


def times_data(ledger: Ledger, shape: Shape) -> dict[str, Any]:
    """Returns the times of a ledger as JSON values."""
    return {
        "shape": shape._asdict(),
        "seconds": ledger.seconds,
        "milliseconds": {
            phase: {layer: value for (name, layer), value in ledger.milliseconds.items() if name == phase}
            for phase in PHASES
            if any(name == phase for name, _ in ledger.milliseconds)
        },
        "target_tokens": ledger.tokens,
        "target_tokens_per_second": ledger.tokens / ledger.seconds if ledger.seconds else None,
        "flops": ledger.flops,
        "flops_per_second": ledger.flops / ledger.seconds if ledger.seconds else None,
        "peak_flops_per_second": ledger.peak_flops_per_second,
        "share_of_peak": ledger.share_of_peak,
    }


def profile_data(profile: Profile) -> dict[str, Any]:
    """Returns a technique's profile as JSON values."""
    times, shape = profile.times, profile.timed_shape
    return {
        "technique": profile.technique.name,
        "ops": profile.technique.implementations._asdict(),
        "precision": profile.technique.precision.name,
        "bytes": "measured" if profile.measured else "estimated",
        "ledger": ledger_data(profile.bytes),
        "times": None if times is None or shape is None else times_data(times, shape),
    }


def report_data(report: Report) -> dict[str, Any]:
    """Returns a whole report as JSON values."""
    sides = ["text"]
    if len(report.vocabulary) > 1:
        sides = ["source", "target", *(f"factor{number}" for number in range(1, len(report.vocabulary) - 1))]
    return {
        "recipe": report.recipe,
        "command": report.command,
        "shape": report.shape._asdict(),
        "vocabulary": dict(zip(sides, report.vocabulary, strict=True)),
        "device": report.device,
        "machine": report.machine,
        "how": report.how,
        "notes": report.notes,
        "ranks": [ledger_data(ledger) for ledger in report.ranks],
        "profiles": [profile_data(profile) for profile in report.profiles],
        "kernels": kernels_data(report.kernels),
    }


def fit_data(fits: Mapping[Technique, Sequence[Fit]], budget: int) -> dict[str, Any]:
    """Returns the largest batches as JSON values."""
    return {
        "budget_bytes": budget,
        "techniques": {technique.name: [fit._asdict() for fit in row] for technique, row in fits.items()},
    }
