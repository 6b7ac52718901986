"""A ledger as JSON values: bytes are bytes, times are milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from econmt_memory.measure.ledger import CATEGORIES, Ledger, Moment
from econmt_memory.report.ledger_tables import grouped, peak_moment

POINTS = 1000
"""Number of points of a downsampled timeline, approximately."""


def downsample(timeline: Sequence[Moment], points: int = POINTS) -> list[Moment]:
    """Reduces a timeline to fewer points with the same outline.

    Of the moments that share a column of the chart, the highest and the last one remain, and each phase's first one.
    """
    if len(timeline) <= points:
        return list(timeline)
    span = timeline[-1].milliseconds or 1.0
    columns = max(1, points // 2)
    kept: list[Moment] = []
    for (phase, _), group in groupby(
        timeline, lambda moment: (moment.phase, int(columns * moment.milliseconds / span))
    ):
        together = list(group)
        highest = max(range(len(together)), key=lambda index: together[index].bytes)
        begins = not kept or kept[-1].phase != phase
        indices = sorted({highest, len(together) - 1} | ({0} if begins else set()))
        kept += [together[index] for index in indices]
    return kept


def ledger_data(ledger: Ledger) -> dict[str, Any]:
    """Returns a ledger as JSON values."""
    return {
        "rank": ledger.rank or None,
        "peak_bytes": ledger.peak,
        "peak_phase": peak_moment(ledger).phase if ledger.timeline else None,
        "entries": [
            {"category": category, "layer": layer, "bytes": size}
            for category in CATEGORIES
            for layer in ledger.layers
            if (size := ledger.entries.get((category, layer)))
        ],
        "stash_bytes": ledger.stashed,
        "stash": {layer: ledger.stash[layer] for layer in ledger.ordered(+ledger.stash)},
        "largest": [{**tensor._asdict(), "count": count} for tensor, count in grouped(ledger.largest)],
        "timeline": [list(moment) for moment in downsample(ledger.timeline)],
        "allocated_bytes": ledger.allocated,
        "reserved_bytes": ledger.reserved,
        "graph_bytes": ledger.graphs,
        "outside_bytes": None if ledger.outside is None else ledger.outside._asdict(),
        "target_tokens": ledger.tokens,
        "flops": ledger.flops,
        **({"flops_by_layer": dict(ledger.operations)} if ledger.operations else {}),
    }
