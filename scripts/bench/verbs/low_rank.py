"""``python -m scripts.bench low-rank``: LSTM layers with thin factors in the place of their matrices."""

from __future__ import annotations

from typing import Annotated

import typer

from econmt.cli.measuring import BenchSession, CsvOption, PlotOption, TypesOption, dtypes_of
from econmt.cli.options import BenchThreadsOption, DeviceOption, within
from econmt.config import limits
from scripts.bench import low_rank_lstm

BOTH_TYPES = ["float32", "bfloat16"]


def low_rank_command(
    hidden: Annotated[
        int, typer.Option(min=1, max=limits.WIDTH, help="Units, and width of the inputs.")
    ] = low_rank_lstm.PUBLISHED[0],
    steps: Annotated[
        int, typer.Option(min=1, max=limits.POSITIONS, help="Of a sequence.")
    ] = low_rank_lstm.PUBLISHED[1],
    batches: Annotated[
        list[int], typer.Option("--batch", min=1, max=limits.BATCH, help="Sequences; may be repeated.")
    ] = low_rank_lstm.BATCHES,
    ranks: Annotated[
        list[int], typer.Option("--rank", min=1, max=limits.WIDTH, help="May be repeated.")
    ] = low_rank_lstm.RANKS,
    dtypes: TypesOption = BOTH_TYPES,
    seconds: Annotated[
        float, typer.Option(callback=within(0.01, limits.SECONDS), help="For each batch, type and pass.")
    ] = 3.0,
    device: DeviceOption = "auto",
    threads: BenchThreadsOption = None,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Time an LSTM layer with whole matrices and with thin factors of several ranks, forward and backward.

    \b
    Example:
      python -m scripts.bench low-rank
      python -m scripts.bench low-rank --batch 16 --csv low-rank.csv
    """
    place, types = BenchSession(device, threads, csv, plot), dtypes_of(dtypes)
    with place.measuring() as say:
        rows = place.kept(
            low_rank_lstm.rows((hidden, steps), batches, ranks, types, place.device, say, seconds=seconds)
        )
    title = f"LSTM of {hidden} units, {steps} steps; gain over the fastest whole layer"
    columns = ("dtype", "batch", "layer", "parameters", *(f"{what}, ms" for what in low_rank_lstm.PASSES))
    place.print(rows, (*columns, *(f"{what}, gain" for what in low_rank_lstm.PASSES), "difference"), title)
    place.draw(rows, label=("dtype", "batch", "layer"), value="forward and backward, ms", title=title)
