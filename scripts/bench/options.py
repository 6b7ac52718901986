"""Times a training step with each option of a model.

    python -m scripts.bench options --device cuda --precision bfloat16      # five minutes, in CUDA graphs
    python -m scripts.bench options --device cpu --precision float32
    python -m scripts.bench options --device cuda --only gru coverage       # rows whose names contain a word

Rows are every shipped recipe, and multi30k with each option alone. "reference" keeps what autograd keeps, "auto" is
what users get; on a GPU "plain" is `scripts.bench.plain_model`, an LSTM with additive attention of the same sizes. In
columns: target tokens a second, in turns, and on a GPU peaks of allocated memory in MB (10^6 bytes).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from econmt.bench.rows import Row
from econmt.config.recipe import load_recipe
from econmt.data.batching.batches import Batch
from econmt.engine.outside_memory import limit_workspaces, outside_meter
from econmt.engine.precision import precision_of
from econmt.engine.step import TrainingStep
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_ops.dispatch.rule import rules_only
from scripts.bench.frame import FAILURES, Bench, Call, brief, in_turns


class Case(NamedTuple):
    """Recipe with changed keys, its batch (rows, source and target positions), and sizes of the vocabularies."""

    name: str
    recipe: str = "multi30k"
    keys: tuple[str, ...] = ()
    shape: tuple[int, int, int] = (64, 20, 20)
    words: tuple[int, int] = (6000, 6000)


RECIPES = (
    Case("iwslt", "iwslt", (), (128, 50, 50), (17191, 7709)),
    Case("groundhog", "groundhog", (), (80, 50, 50), (17191, 7709)),
    Case("best", "best", (), (32, 100, 100), (16000, 16000)),
    Case("gnmt", "gnmt", (), (128, 25, 25), (32000, 32000)),
    Case("laws-en-fr", "laws-en-fr", (), (128, 50, 50), (16000, 16000)),
    Case("tatoeba", "tatoeba", (), (128, 12, 12), (8000, 8000)),
    Case("student", "student", (), (128, 30, 30), (4000, 4000)),
    Case("quickstart", "quickstart", (), (64, 20, 20), (200, 200)),
    Case("multi30k"),
)
_TWO = "model.decoder.layers=2"
_PARALLEL = "model.decoder.input_feeding=false"


def _option(*keys: str) -> Case:
    return Case(", ".join(key.removeprefix("model.") for key in keys), keys=keys)


OPTIONS = (
    *(_option(f"model.decoder.cell={cell}") for cell in ("gru", "lnlstm", "lnglstm")),
    *(
        _option(f"model.encoder.cell={cell}")
        for cell in ("gru", "lnlstm", "lnglstm", "sru", "qrnn", "min_gru")
    ),
    _option("model.encoder.cell=gru", "model.decoder.cell=gru"),
    _option("model.layer_normalization=true"),
    _option("model.decoder.context_gating=true"),
    *(_option(f"model.attention.coverage.type={kind}") for kind in ("count", "fertility", "tanh", "gru")),
    _option("model.attention.coverage={type: tanh, num_hidden: 8}"),
    _option("model.attention.layer_norm=true"),
    *(_option(f"model.attention.type={kind}") for kind in ("dot", "scaled_dot", "bilinear")),
    _option("model.attention.size=512"),
    _option(_TWO),
    _option(_TWO, "model.decoder.residual=true"),
    _option(_TWO, "model.decoder.cell=gru", "model.decoder.residual=true"),
    _option("model.encoder.layers=2"),
    _option("model.encoder.layers=2", "model.encoder.bidirectional=all"),
    _option("model.encoder.bidirectional=none"),
    _option("model.encoder.bidirectional=none", "model.encoder.reverse_input=true"),
    _option(_PARALLEL, _TWO),
    _option(_PARALLEL, _TWO, "model.decoder.cell=ssru"),
    *(_option(f"model.decoder.state_init={kind}") for kind in ("zero", "avg")),
    _option("model.decoder.size=600"),
    _option("model.decoder.size=1024"),
    _option("model.decoder.rank=64"),
    _option("model.dropout=0.0"),
    _option(_TWO, "model.dropout={layers: 0.3, variational: true}"),
    _option("model.weight_tying=none"),
    _option("training.label_smoothing=0.1"),
)
ROWS_ON_A_CPU = 4
"""Number by which the rows of a batch are divided on a CPU."""


def prepared(
    task: TranslationTask, batch: Batch, variant: str, precision: str, device: torch.device
) -> tuple[Call, int]:
    """Builds a training step, captured on a GPU; returns it with its peak of allocated bytes, 0 on a CPU."""
    if device.type == "cuda":
        from scripts.bench.gpu.step import prepare

        run = prepare(variant, task, [batch], precision)
        return partial(run.step, 0), run.allocated
    torch.manual_seed(1)
    implementations = Implementations.everywhere(variant, task.recipe.ops.stash)
    model = task.build_model().train()
    step = TrainingStep(task, model, precision_of(precision, device), implementations=implementations)
    tokens = step.tokens([batch])
    step.run([batch], tokens)
    return lambda: step.run([batch], tokens), 0


def row_of(case: Case, precision: str, device: torch.device, seconds: float) -> Row:
    """Times a case; its failure, or why its keys are refused, is a column of the row."""
    row: Row = {"model": case.name}
    try:
        task = TranslationTask(load_recipe(case.recipe, list(case.keys)), *case.words)
        rows, *positions = case.shape
        if device.type == "cpu":
            rows //= ROWS_ON_A_CPU
        torch.manual_seed(2)
        batch = task.example(Shape(rows, *positions))
        names = ["reference", "auto"]
        if device.type == "cuda" and task.recipe.translation_model.decoder.input_feeding:
            names.insert(0, "plain")
        runs = {name: prepared(task, batch, name, precision, device) for name in names}
        repeats = 20 if device.type == "cuda" else 1
        calls = {name: partial(_repeat, run, repeats) for name, (run, _) in runs.items()}
        timings = in_turns(calls, device, seconds=seconds * len(calls))
    except (InputError, *FAILURES) as error:
        return row | {"failure": brief(error)}
    speeds = {name: repeats * batch.target_tokens / timing.median for name, timing in timings.items()}
    row |= {f"{name} tokens/s": speed for name, speed in speeds.items()}
    row["auto / reference"] = f"{speeds['auto'] / speeds['reference']:.2f}"
    if device.type == "cuda":
        row |= {f"{name} MB": round(runs[name][1] / 1e6) for name in names[-2:]}
    return row


def _repeat(run: Call, times: int) -> None:
    for _ in range(times):
        run()


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="cpu", seconds=1.0)
    add = bench.add_argument
    add("--precision", default="float32", help="precision of both (%(default)s)")
    add("--only", nargs="+", default=[""], help="rows whose name contains one of these words")
    given = bench.begin(words)
    if given.device.type == "cuda":
        limit_workspaces(given.precision)
        outside_meter(given.device)
    bench.print_header(given.precision)
    chosen = [case for case in (*RECIPES, *OPTIONS) if any(word in case.name for word in given.only)]

    def rows() -> Iterator[Row]:
        for case in chosen:
            yield row_of(case, given.precision, given.device, given.seconds)
            gc.collect()

    with rules_only():  # as econmt train: one implementation for all shapes
        bench.report(rows())
