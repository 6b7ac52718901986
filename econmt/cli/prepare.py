"""``econmt prepare``: writes the token store of a recipe's text, and reports its contents and padding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from econmt.config.recipe import Recipe, TextData
from econmt.data.batching.batches import bucket_rule, derived_rule, longer_than, training_batches
from econmt.data.batching.bucket_shapes import Counts, Derived
from econmt.data.batching.buckets import bucket_table, count_lengths
from econmt.data.batching.padding import (
    measure_padding,
    padded_to_buckets,
    planned,
    random_batches,
    real_work,
)
from econmt.data.batching.pair_flops import PairFlops, pair_flops
from econmt.data.batching.store import PreparedData, store_folder
from econmt.data.batching.store import prepare as prepare_data
from econmt.data.batching.token_store import length_quantiles
from econmt.data.progress_bars import status_line
from econmt.data.text.filters import report_lines
from econmt.engine.devices import give_back_memory
from econmt.errors import printable
from econmt.options.option_groups import option
from econmt.options.shared_options import TextRecipe, VerifyOption
from econmt_memory.report.tables import format_bytes

COMPARED_WIDTHS = (2, 4, 8, 10)
"""Widths of fixed buckets whose padding is printed for comparison."""


def prepare(
    recipe: TextRecipe,
    output: Path | None = option(
        None, "--output", "-o", help="Folder of the token store; default: the one that training uses."
    ),
    verify: VerifyOption = False,
) -> None:
    """Write the token store of a recipe's text without training, and report its contents.

    The same command and training reuse the store as long as the text and the recipe's data section do not change.

    \b
    Example:
      econmt prepare multi30k data.subwords.size=6000 --data-dir corpora
    """
    resolved = recipe.load({"data.prepared": None if output is None else str(output)})
    prepared = prepare_data(
        resolved, store_folder(resolved), recipe.search_path, show_progress=True, verify=verify
    )
    give_back_memory(torch.device("cpu"))  # which learning the vocabulary took
    with status_line() as say:
        say("computing the cost of padding")
        lines = report(resolved, prepared)
    for line in lines:
        print(printable(line))


def report(recipe: Recipe, prepared: PreparedData) -> list[str]:
    """Returns the lines of a report on a store."""
    statistics = prepared.statistics
    size = sum(path.stat().st_size for path in prepared.folder.iterdir() if path.is_file())
    if isinstance(recipe.data, TextData):
        return _text_report(prepared, size)
    vocabularies = prepared.vocabularies
    factors = zip(recipe.data.source_factors, vocabularies.factor_sizes, strict=True)
    pairs, annotated = statistics["train"]["pairs"], statistics["train"].get("annotated", 0)
    lines = [
        f"store       {prepared.folder} ({format_bytes(size)}, made in {statistics['seconds']} s)",
        f"vocabulary  source {statistics['source_vocabulary']:,}, target {statistics['target_vocabulary']:,}"
        + (" (joint)" if vocabularies.source is vocabularies.target else "")
        + "".join(f", {name} {size:,}" for name, size in factors),
        *([f"terms       annotated in {annotated:,} of {pairs:,} training pairs"] if annotated else []),
        "",
        _row("", 8, ("", "source", "target", "", "too", ""), 12),
        _row("text", 8, ("pairs", "tokens", "tokens", "unknown", "long", "empty"), 12),
    ]
    stores, longest = {"valid": prepared.valid, "test": prepared.test}, recipe.pairs.max_length
    kept = {split: int(longer_than(store, longest).sum()) for split, store in stores.items() if store}
    lines += [
        _split_line(split, statistics[split], kept.get(split, 0))
        for split in ("train", "valid", "test")
        if split in statistics
    ]
    if any(kept.values()):
        lines.append("Training leaves out pairs that are too long; valid and test keep them.")
    lines += ["", _row("tokens a sentence", 20, ("least", "25 %", "50 %", "75 %", "95 %", "99 %", "most"), 7)]
    for side in ("source", "target"):
        quantiles = length_quantiles(getattr(prepared.train, f"{side}_lengths"))
        lines.append(_row(f"train {side}", 20, [str(value) for value in quantiles], 7))
        prepared.train.release()
    dropped = report_lines(prepared.folder)
    lines += ["", *dropped] if dropped else []
    return [*lines, "", *_bucket_lines(recipe, prepared)]


def _text_report(prepared: PreparedData, size: int) -> list[str]:
    """Returns the lines of a report on the text of a language model."""
    statistics = prepared.statistics
    lines = [
        f"store       {prepared.folder} ({format_bytes(size)}, made in {statistics['seconds']} s)",
        f"vocabulary  {statistics['target_vocabulary']:,}",
        "",
        _row("text", 8, ("lines", "words", "tokens", "unknown"), 15),
    ]
    for split in ("train", "valid", "test"):
        if split in statistics:
            counts = statistics[split]
            # The end of a line is a token and a word.
            values = counts["lines"], counts["words"], counts["target_tokens"], counts["target_unknown"]
            lines.append(_row(split, 8, [f"{value:,}" for value in values], 15))
    return lines


def _row(title: str, width: int, cells: Sequence[str], cell_width: int) -> str:
    return f"{title:<{width}}" + "".join(f"{cell:>{cell_width}}" for cell in cells)


def _split_line(split: str, counts: dict[str, int], kept: int) -> str:
    """Returns a row of the table; ``kept``: pairs that are too long for training and are kept."""
    unknown = counts["source_unknown"] + counts["target_unknown"]
    values = (counts["pairs"], counts["source_tokens"], counts["target_tokens"], unknown)
    return _row(
        split, 8, [f"{value:,}" for value in (*values, counts["too_long"] + kept, counts["empty"])], 12
    )


def _bucket_lines(recipe: Recipe, prepared: PreparedData) -> list[str]:
    target_vocabulary = prepared.vocabularies.target.size
    rule = bucket_rule(recipe, target_vocabulary)
    work = pair_flops(recipe.translation_model, target_vocabulary)
    store = prepared.train
    counts = count_lengths(store.source_lengths, store.target_lengths, None, store.release)
    table = bucket_table(counts, rule)
    pairs, tokens, padded = (sum(values) for values in list(zip(*table, strict=True))[3:])
    titles = ("pairs", "share", "tokens", "padded", "real")
    kind = "derived from these lengths" if isinstance(rule, Derived) else f"of width {rule}"
    lines = [f"buckets {kind}, </s> counted", _row("source x target", 20, titles, 12)]
    for row in table:
        least, most = row.smallest_source, row.largest_source
        shape = f"{most} x {row.target}" if least == most else f"{least}-{most} x {row.target}"
        lines.append(_row(shape, 20, _bucket_cells(row.pairs, pairs, row.tokens, row.padded), 12))
    lines.append(_row("all", 20, _bucket_cells(pairs, pairs, tokens, padded), 12))
    return [*lines, "", *_work_lines(recipe, prepared, counts, rule, work)]


def _work_lines(
    recipe: Recipe, prepared: PreparedData, counts: Counts, rule: int | Derived, work: PairFlops
) -> list[str]:
    """Returns lines on the cost of padding with the recipe's buckets, with other buckets and without buckets."""
    batch, store = recipe.training.batch, prepared.train
    real = real_work(counts, work)
    lines = [
        f"work of an epoch's forward passes: {real / 1e12:,.2f} TFLOP without padding;",
        f"batches of {batch.size:,} {'sentences' if batch.type == 'sentence' else 'target tokens'}",
        _row("", 38, ("shapes", "padded", "trimmed"), 14),
    ]
    padding = measure_padding(random_batches(store.source_lengths, store.target_lengths, batch), work)
    lines.append(_padding_line("no buckets, random batches", padding.shapes, padding.padded, None))
    for width in COMPARED_WIDTHS:
        if width != rule:
            cost = padded_to_buckets(counts, width, batch, work)
            lines.append(_padding_line(f"fixed buckets of width {width}", *cost, None))
    if not isinstance(rule, Derived):
        other = derived_rule(recipe, prepared.vocabularies.target.size)
        lines.append(_padding_line("derived buckets", *padded_to_buckets(counts, other, batch, work), None))
    name = "derived buckets" if isinstance(rule, Derived) else f"fixed buckets of width {rule}"
    padding = measure_padding(planned(training_batches(recipe, prepared)), work)
    shapes, padded = padded_to_buckets(counts, rule, batch, work)
    return [*lines, _padding_line(f"{name} (this recipe)", shapes, padded, padding.trimmed)]


def _padding_line(name: str, shapes: int, padded: float, trimmed: float | None) -> str:
    costs = ("" if cost is None else f"+{100 * (cost - 1):.1f} %" for cost in (padded, trimmed))
    return _row(name, 38, [f"{shapes:,}", *costs], 14).rstrip()


def _bucket_cells(pairs: int, all_pairs: int, tokens: int, padded: int) -> list[str]:
    share, real = f"{100 * pairs / all_pairs:.1f} %", f"{100 * tokens / padded:.1f} %"
    return [f"{pairs:,}", share, f"{tokens:,}", f"{padded:,}", real]
