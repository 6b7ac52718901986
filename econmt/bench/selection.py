"""Measures what "auto" chooses: the time of each candidate for a recipe's ops, and the loss of the choice on a grid."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import econmt_ops
from econmt.bench.rows import Row, Say, Value
from econmt.config.recipe import Recipe
from econmt.engine.precision import Precision
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.registry import task_of_sizes
from econmt.training.choice import POSITIONS, choose_implementations, measure
from econmt_ops import AttentionalLSTMWeights, LSTMWeights
from econmt_ops.dispatch.measurements import Measurement
from econmt_ops.dispatch.session import measuring
from econmt_ops.dispatch.timing import quantile

MOST_OPERATIONS = 40e9
"""Maximum number of floating-point operations of a grid entry, forward and backward; a call takes a second or less."""

NEAR = 0.05
"""Regret below which a choice counts as good."""

VOCABULARY = 8000
"""Vocabulary size of the grid's output layers."""


class Chosen(NamedTuple):
    """Measurements of a recipe's ops, and the implementations that a run would use."""

    measurements: list[Measurement]
    implementations: Implementations
    seconds: float


def choose(
    recipe: Recipe,
    sizes: Sequence[int],
    shape: Shape,
    device: torch.device,
    precision: Precision,
    *,
    seconds: float,
    compiled: bool,
    byte_limit: int | None,
    updates: float,
) -> Chosen:
    """Measures the ops that a recipe leaves at auto, as a run does at its start, and caches the figures for runs.

    Args:
        recipe, sizes, shape: the recipe, sizes of its vocabularies, and shape of its batches.
        device, precision: device and precision of products.
        seconds: maximum time for measuring.
        compiled: True to include compiled candidates, which takes long.
        byte_limit: maximum bytes of an op's stash; None: no limit.
        updates: number of updates of the run, in which compiling must pay.
    """
    task = task_of_sizes(recipe, sizes)
    model = task.build_model().to(device).train()
    session = measure(
        task, model, shape, precision, seconds=seconds, compiled=compiled, byte_limit=byte_limit
    )
    measurements = list(session.measurements.values())
    positions = max(shape.source, shape.target)
    chosen = choose_implementations(
        Implementations.of(recipe.ops),
        measurements,
        device=device.type,
        updates=updates,
        positions=positions / min(positions, POSITIONS),
    )
    return Chosen(measurements, chosen, session.seconds)


def rows_of(measurements: Iterable[Measurement], byte_limit: int | None = None) -> list[Row]:
    """Makes a row for every candidate of every op."""
    rows: list[Row] = []
    for measurement in measurements:
        choice = measurement.choice(byte_limit)
        for name, record in sorted(measurement.records.items(), key=lambda item: item[1].milliseconds):
            marks = {"chosen": name == choice, " (rule)": name == measurement.rule}
            rows.append(
                {
                    "bench": "select",
                    "problem": measurement.key,
                    "calls": measurement.calls,
                    "candidate": name,
                    "milliseconds": record.milliseconds,
                    "lowest decile": record.low,
                    "highest decile": record.high,
                    "bytes kept": record.bytes,
                    "first call, s": record.first_seconds,
                    "chosen": "".join(mark for mark, applies in marks.items() if applies),
                    "regret": measurement.regret(name),
                }
            )
    return rows


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


def regrets(
    entries: Sequence[GridEntry], device: torch.device, seconds: float, limit: float, say: Say
) -> Iterator[Row]:
    """Lets auto choose at each shape, then measures all candidates again to find what the choice loses.

    A choice takes at most ``seconds``, measuring again up to three times as long, and comparing the choice with the
    best candidate in turns twice as long. No further shape is begun after ``limit`` seconds.
    """
    end = time.monotonic() + limit
    for number, entry in enumerate(entries):
        if time.monotonic() > end:
            return
        say(f"select: {number + 1} of {len(entries)}: {' '.join(map(str, entry))}")
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
        loss = Loss(0.0, 0.0, 0) if choice == best else _compare(call, choice, best, 2 * seconds)
        yield {
            "bench": "select-grid",
            **entry._asdict(),
            "candidates": len(after.records),
            "choice": choice,
            "milliseconds": after.records[choice].milliseconds,
            "best": best,
            "best milliseconds": after.records[best].milliseconds,
            "rule": after.rule,
            "rule milliseconds": after.records[after.rule].milliseconds,
            "regret": loss.beyond_noise,
            "regret with noise": loss.share,
            "turns": loss.turns,
            "regret of the rule": after.regret(after.rule),
            "seconds to choose": first.seconds,
        }


class Loss(NamedTuple):
    """Relative loss of one candidate against another.

    Attributes:
        share: median over turns, in each of which both were called.
        least: lower bound of the true median with 95 % confidence; ``share`` if there are too few turns.
        turns: number of turns.
    """

    share: float
    least: float
    turns: int

    @property
    def beyond_noise(self) -> float:
        """The loss; 0 if the two may be equally fast."""
        return self.share if self.least > 0.0 else 0.0


def loss_of(choice: Sequence[float], best: Sequence[float]) -> Loss:
    """Compares samples in seconds whose n-th were taken one after the other, so that what disturbs both cancels out."""
    ratios = sorted(mine / other for mine, other in zip(choice, best, strict=True))
    count = len(ratios)
    share = quantile(ratios, 0.5) - 1
    # The k-th smallest of n samples exceeds the true median as often as fewer than k of n coins show heads.
    below, left = 0, 0.05 * 2**count
    while below < count and (left := left - math.comb(count, below)) >= 0:
        below += 1
    return Loss(share, share if below == 0 else ratios[below - 1] - 1, count)


def _compare(call: Callable[[], object], choice: str, best: str, seconds: float) -> Loss:
    """Times two candidates in turns again, since the best of several has also been lucky."""
    with measuring(seconds, only=(choice, best), remember=False) as session:
        call()
    if not session.samples:
        raise InputError(
            "econmt bench select --grid: calls take too long to be compared; give more --seconds"
        )
    (samples,) = session.samples.values()
    return loss_of(samples[choice], samples[best])


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
    of_grid = (row for row in rows if row["bench"] == "select-grid")
    last = {tuple(row[name] for name in GridEntry._fields): dict(row) for row in of_grid}
    return [last[key] for entry in grid() if (key := tuple(map(str, entry))) in last]
