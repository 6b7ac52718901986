"""``econmt prepare``: write the token store of a recipe's text, and say what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from econmt.data.buckets import bucket_table
from econmt.data.corpus import search_path
from econmt.data.store import PreparedData, length_quantiles, store_folder
from econmt.data.store import prepare as prepare_data
from econmt.recipe import Recipe, find_recipe, load_recipe


def prepare(
    recipe: Annotated[str, typer.Argument(help="Recipe: a file, or a shipped name.", show_default=False)],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045  typer reads it at run time, on Python 3.10 too
        typer.Argument(metavar="[KEY=VALUE]...", help="What to change.", show_default=False),
    ] = None,
    data_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Folder in which the text is looked up, beside the recipe's own.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--output",
            "-o",
            help="Folder of the store; default: where training looks for it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the token store of a recipe's text without training, and report on it.

    The same command again, and training, reuse it as long as the text and the recipe's data section are the same.

    \b
    Example:
      econmt prepare multi30k data.subwords.size=6000 --data-dir corpora
    """
    resolved = load_recipe(recipe, overrides or ())
    folder = output if output is not None else store_folder(resolved)
    search = search_path(find_recipe(recipe).parent, data_dir)
    prepared = prepare_data(resolved, folder, search, show_progress=True)
    for line in report(resolved, prepared):
        print(line)


def report(recipe: Recipe, prepared: PreparedData) -> list[str]:
    """Lines that say what a store holds."""
    statistics = prepared.statistics
    lines = [
        f"store       {prepared.folder} ({_bytes(_size(prepared.folder))}, made in {statistics['seconds']} s)",
        f"vocabulary  source {statistics['source_vocabulary']:,}, target {statistics['target_vocabulary']:,}"
        + (" (joint)" if prepared.vocabularies.source is prepared.vocabularies.target else ""),
        "",
        _row("text", 8, ("pairs", "source tokens", "target tokens", "unknown", "too long", "empty")),
    ]
    lines += [
        _split_line(split, statistics[split]) for split in ("train", "valid", "test") if split in statistics
    ]
    lines += ["", _row("tokens a sentence", 20, ("least", "25 %", "50 %", "75 %", "95 %", "99 %", "most"), 7)]
    for side, lengths in (
        ("source", prepared.train.source_lengths),
        ("target", prepared.train.target_lengths),
    ):
        lines.append(_row(f"train {side}", 20, [str(value) for value in length_quantiles(lengths)], 7))
    return [*lines, "", *_bucket_lines(recipe, prepared)]


def _row(title: str, width: int, cells: Sequence[str], cell_width: int = 15) -> str:
    return f"{title:<{width}}" + "".join(f"{cell:>{cell_width}}" for cell in cells)


def _split_line(split: str, counts: dict[str, int]) -> str:
    unknown = counts["source_unknown"] + counts["target_unknown"]
    values = (counts["pairs"], counts["source_tokens"], counts["target_tokens"], unknown)
    return _row(split, 8, [f"{value:,}" for value in (*values, counts["too_long"], counts["empty"])])


def _bucket_lines(recipe: Recipe, prepared: PreparedData) -> list[str]:
    width = recipe.training.bucket_width
    table = bucket_table(prepared.train.source_lengths, prepared.train.target_lengths, width)
    pairs, tokens, padded = (sum(values) for values in list(zip(*table, strict=True))[3:])
    titles = ("pairs", "share", "tokens", "padded", "real")
    lines = [f"buckets of width {width}, </s> counted", _row("source x target", 20, titles, 14)]
    for row in table:
        shape = f"{row.smallest_source}-{row.largest_source} x {row.target}"
        lines.append(_row(shape, 20, _bucket_cells(row.pairs, pairs, row.tokens, row.padded), 14))
    return [*lines, _row("all", 20, _bucket_cells(pairs, pairs, tokens, padded), 14)]


def _bucket_cells(pairs: int, all_pairs: int, tokens: int, padded: int) -> list[str]:
    share, real = f"{100 * pairs / all_pairs:.1f} %", f"{100 * tokens / padded:.1f} %"
    return [f"{pairs:,}", share, f"{tokens:,}", f"{padded:,}", real]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
