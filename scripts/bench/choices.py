"""Measures what ``auto`` loses on a grid of shapes.

    python -m scripts.bench choices --csv choices.csv
    python -m scripts.bench choices --part 3/8 --threads 2 --csv 3.csv
    python -m scripts.bench choices --summary 1.csv 2.csv

At each shape ``auto`` chooses, and then all candidates are measured again. The regret of a choice is how much slower it
is than the best candidate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import econmt_ops
from econmt.bench.rows import Row, Value, read_csv
from econmt.engine.devices import reproducible
from econmt.errors import InputError
from econmt_ops import AttentionalLSTMWeights, LSTMWeights
from econmt_ops.dispatch.session import measuring
from scripts.bench.frame import Bench, Ratio, print_rows, ratio_of

MOST_OPERATIONS = 40e9
"""Maximum number of floating-point operations of a grid entry, forward and backward; a call takes a second or less."""

NO_LOSS = Ratio(1.0, 1.0, 1.0)
NEAR = 0.05
"""Regret below which a choice counts as good."""

VOCABULARY = 8000
"""Vocabulary size of the grid's output layers."""


class GridEntry(NamedTuple):
    """Op and shape of the grid: rows, positions, hidden size and type."""

    op: str
    batch: int
    length: int
    hidden: int
    dtype: str

    @property
    def operations(self) -> float:
        """Floating-point operations of the products, forward and backward."""
        positions = self.batch * self.length
        if self.op == "linear_cross_entropy":
            return 6.0 * positions * self.hidden * VOCABULARY
        factor = {"linear": 4, "lstm": 8, "attentional_lstm": 16}[self.op]
        return 6.0 * positions * factor * self.hidden**2


def grid() -> list[GridEntry]:
    """Returns the grid: batches of 1 to 512, hidden sizes of 128 to 1,024, lengths of 5 to 100, both types."""
    entries = [
        GridEntry(op, batch, length, hidden, dtype)
        for op, batches, lengths in (
            ("lstm", (1, 16, 64, 512), (5, 25, 100)),
            ("linear", (1, 16, 64, 512), (5, 25, 100)),
            ("attentional_lstm", (8, 64), (5, 25)),
            ("linear_cross_entropy", (8, 64), (5, 25)),
        )
        for batch in batches
        for length in lengths
        for hidden in (128, 256, 512, 1024)
        for dtype in ("float32", "bfloat16")
    ]
    # Not every hidden size with every length: half of the combinations, all values of each.
    thinned = [entry for number, entry in enumerate(entries) if (number // 2) % 2 == 0 or entry.batch == 64]
    return [entry for entry in thinned if entry.operations <= MOST_OPERATIONS]


def regrets(entries: Sequence[GridEntry], device: torch.device, seconds: float) -> Iterator[Row]:
    """Lets auto choose at each shape, then measures all candidates again to find what the choice loses.

    A choice takes at most ``seconds``, measuring again up to three times as long, and comparing the choice with the
    best candidate in turns twice as long.
    """
    for entry in entries:
        call = _call(entry, device)
        with measuring(seconds, remember=False) as first:
            call()
        with measuring(3 * seconds, remember=False) as second:
            call()
        if not second.measurements:
            continue
        (after,) = second.measurements.values()
        before = next(iter(first.measurements.values()), None)
        choice = after.rule if before is None else before.choice()
        best = min(after.records, key=lambda name: after.records[name].milliseconds)
        loss, turns = _compare(call, choice, best, 2 * seconds) if choice != best else (NO_LOSS, 0)
        yield {
            **entry._asdict(),
            "candidates": len(after.records),
            "choice": choice,
            "milliseconds": after.records[choice].milliseconds,
            "best": best,
            "best milliseconds": after.records[best].milliseconds,
            "rule": after.rule,
            "rule milliseconds": after.records[after.rule].milliseconds,
            "regret": loss.value - 1 if loss.low > 1.0 else 0.0,  # else the two may be equally fast
            "regret with noise": loss.value - 1,
            "turns": turns,
            "regret of the rule": after.regret(after.rule),
            "seconds to choose": first.seconds,
        }


def _compare(call: Callable[[], object], choice: str, best: str, seconds: float) -> tuple[Ratio, int]:
    """Times two candidates in turns again, since the best of several has also been lucky."""
    with measuring(seconds, only=(choice, best), remember=False) as session:
        call()
    if not session.samples:
        raise InputError("calls take too long to be compared; give more --seconds")
    (samples,) = session.samples.values()
    return ratio_of(samples[choice], samples[best]), len(samples[best])


def _call(entry: GridEntry, device: torch.device) -> Callable[[], object]:
    """Returns a call of the op of a grid entry on random tensors with gradients."""
    dtype = getattr(torch, entry.dtype)
    draw = torch.Generator().manual_seed(1)

    def make(*size: int) -> Tensor:
        return (0.1 * torch.randn(*size, generator=draw)).to(device, dtype).requires_grad_()

    rows, length, hidden = entry.batch, entry.length, entry.hidden
    if entry.op == "linear":
        x, weight, bias = make(rows * length, hidden), make(4 * hidden, hidden), make(4 * hidden)
        return lambda: econmt_ops.linear(x, weight, bias)
    if entry.op == "linear_cross_entropy":
        x, weight = make(rows * length, hidden), make(VOCABULARY, hidden)
        targets = torch.randint(0, VOCABULARY, (rows * length,), generator=draw).to(device)
        return lambda: econmt_ops.linear_cross_entropy(x, weight, targets)
    inputs = make(rows, length, hidden)
    if entry.op == "lstm":
        layer = LSTMWeights(make(4 * hidden, hidden), make(4 * hidden, hidden), make(4 * hidden))
        return lambda: econmt_ops.lstm(inputs, (layer,))
    fed = LSTMWeights(make(4 * hidden, 2 * hidden), make(4 * hidden, hidden), make(4 * hidden))
    memory = make(rows, length, hidden)
    attention = make(hidden, hidden), make(hidden), make(hidden, 2 * hidden), make(hidden)
    weights = AttentionalLSTMWeights((fed,), *attention)
    return lambda: econmt_ops.attentional_lstm(inputs, memory, memory, weights, lengths=None)


def part_of(entries: Sequence[GridEntry], part: str) -> list[GridEntry]:
    """Returns the entries i, i + n, ... of ``part`` "i/n", counted from 1; raises InputError for any other text."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise InputError(f"--part '{part}': give i/n with i from 1 to n, for example 1/8")
    return list(entries[number - 1 :: count])


SUMMARY = (
    "op",
    "shapes",
    "largest regret",
    "mean regret",
    "within 5 %",
    "largest regret of the rule",
    "mean regret of the rule",
    "rule within 5 %",
    "perhaps noise",
    "worst shape",
)
"""Columns of a summary; the rule alone is kept unless another candidate is faster by more than its margin."""


def summary(rows: Sequence[Mapping[str, Value]]) -> list[Row]:
    """Summarizes rows of the grid, a row for each op and, of several, one for all: loss of the choices and of the rule.

    "perhaps noise" counts losses that are taken for none because they may be noise.
    """
    ops = dict.fromkeys(str(row["op"]) for row in rows)
    groups = {op: [row for row in rows if row["op"] == op] for op in ops}
    if len(groups) > 1:
        groups["all"] = list(rows)
    return [_summary_row(op, group) for op, group in groups.items()]


def _summary_row(op: str, rows: Sequence[Mapping[str, Value]]) -> Row:
    regrets, by_rule = ([float(row[name]) for row in rows] for name in ("regret", "regret of the rule"))
    worst = rows[regrets.index(max(regrets))]
    shape = " ".join(str(worst[name]) for name in GridEntry._fields)
    noise = [row for row, regret in zip(rows, regrets, strict=True) if regret == 0.0]
    values = (
        op,
        len(rows),
        max(regrets),
        sum(regrets) / len(rows),
        sum(regret <= NEAR for regret in regrets),
        max(by_rule),
        sum(by_rule) / len(rows),
        sum(regret <= NEAR for regret in by_rule),
        sum(float(row.get("regret with noise") or 0.0) > 0.0 for row in noise),
        f"{shape}: {worst['choice']} chosen, {worst['best']} is best" if max(regrets) > 0.0 else "",
    )
    return dict(zip(SUMMARY, values, strict=True))


def joined(rows: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Selects the last row of each shape from the rows of several files, in the order of the grid."""
    of_grid = (row for row in rows if row["bench"] == "choices")
    last = {tuple(row[name] for name in GridEntry._fields): dict(row) for row in of_grid}
    return [last[key] for entry in grid() if (key := tuple(map(str, entry))) in last]


def main(words: Sequence[str] | None = None) -> None:
    """Runs the benchmark; see the module's docstring."""
    bench = Bench(__doc__, device="auto", seconds=2.0)
    add = bench.add_argument
    add("--part", default="1/1", metavar="I/N", help="measure only the shapes I, I + N, ... (%(default)s)")
    add("--summary", nargs="+", type=Path, metavar="CSV", help="measure nothing, and summarize these files")
    given = bench.begin(words)
    if given.summary:
        before = joined(row for path in given.summary for row in read_csv(path)[1])
        if not before:
            raise InputError(f"{given.summary[0]}: has no rows of this benchmark")
        print_rows(summary(before), "regret", SUMMARY)
        return
    with reproducible(bench.device, given.threads):
        rows = bench.report(
            regrets(part_of(grid(), given.part), bench.device, given.seconds),
            columns=(*GridEntry._fields, "choice", "best", "regret"),
        )
    print_rows(summary(rows), "regret", SUMMARY)
