"""Ledgers as tables for a person."""

from __future__ import annotations

from rich.table import Table

from econmt.memory.ledger import CATEGORIES, LAYERS, Ledger


def format_bytes(size: float) -> str:
    """A byte count in decimal units, as the tables of the literature print it: 1.2 MB."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def table(ledger: Ledger) -> Table:
    """The ledger as a table: a row a layer, a column a category, sums at the edges, and each layer's share."""
    total = ledger.total or 1
    result = Table(title=f"where the bytes of a training step went ({ledger.tokens} target tokens)")
    result.add_column("layer")
    for category in (*CATEGORIES, "all", "share"):
        result.add_column(category, justify="right")
    for layer in LAYERS:
        if not ledger.layer(layer):
            continue
        cells = [format_bytes(ledger.entries.get((category, layer), 0)) for category in CATEGORIES]
        result.add_row(
            layer, *cells, format_bytes(ledger.layer(layer)), f"{100 * ledger.layer(layer) / total:.0f} %"
        )
    sums = [format_bytes(ledger.category(category)) for category in CATEGORIES]
    result.add_section()
    result.add_row("all", *sums, format_bytes(ledger.total), "100 %")
    return result
