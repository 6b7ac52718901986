"""``python -m scripts.bench low-rank``: LSTM layers with thin factors in the place of their matrices."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from econmt.cli.measuring import BenchSession, Dtypes, dtypes_of
from econmt.cli.option_groups import option, with_option_groups
from econmt.config import limits
from scripts.bench import low_rank_lstm


@with_option_groups
def low_rank_command(
    *,
    hidden: int = option(
        low_rank_lstm.PUBLISHED[0], help="Units, and width of the inputs.", min=1, max=limits.WIDTH
    ),
    steps: int = option(low_rank_lstm.PUBLISHED[1], help="Of a sequence.", min=1, max=limits.POSITIONS),
    batches: list[int] = option(
        low_rank_lstm.BATCHES, "--batch", help="Sequences; may be repeated.", min=1, max=limits.BATCH
    ),
    ranks: list[int] = option(
        low_rank_lstm.RANKS, "--rank", help="May be repeated.", min=1, max=limits.WIDTH
    ),
    dtypes: Dtypes = ["float32", "bfloat16"],  # noqa: B006  typer copies it
    seconds: Annotated[float, Field(ge=0.01, le=limits.SECONDS)] = option(
        3.0, help="For each batch, type and pass."
    ),
    session: BenchSession,
) -> None:
    """Time an LSTM layer with whole matrices and with thin factors of several ranks, forward and backward.

    \b
    Example:
      python -m scripts.bench low-rank
      python -m scripts.bench low-rank --batch 16 --csv low-rank.csv
    """
    types = dtypes_of(dtypes)
    with session.measuring() as say:
        rows = session.kept(
            low_rank_lstm.rows((hidden, steps), batches, ranks, types, session.device, say, seconds=seconds)
        )
    title = f"LSTM of {hidden} units, {steps} steps; gain over the fastest whole layer"
    columns = ("dtype", "batch", "layer", "parameters", *(f"{what}, ms" for what in low_rank_lstm.PASSES))
    session.print(rows, (*columns, *(f"{what}, gain" for what in low_rank_lstm.PASSES), "difference"), title)
    session.draw(rows, label=("dtype", "batch", "layer"), value="forward and backward, ms", title=title)
