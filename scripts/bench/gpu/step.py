"""Times whole training steps on a GPU against PyTorch.

    python -m scripts.bench gpu.step                       # all workloads, all precisions
    python -m scripts.bench gpu.step --only W2 --precision bfloat16 --variants plain auto
    python -m scripts.bench gpu.step --only W2 --budget 4GiB --variants reference auto

W2 is the model and batch of Echo (recipe iwslt, 128 x 100 x 100, all rows full). W1 is the multi30k recipe with batches
of 64 pairs of natural lengths (21 x 22, 10 x 10, 20 x 17 positions, half of the rows shorter). GNMT is the gnmt recipe,
128 x 25 x 25, and GNMT384 has 384 pairs. GROUNDHOG and BEST are two other models that Echo was measured with, recipes
groundhog and best, 80 x 50 x 50 and 32 x 100 x 100. "plain" is the same model in plain PyTorch; it exists only for
models with input feeding and without layer normalisation.

With --budget each variant gets the largest batch whose captured step peaks within these bytes.

All variants run in CUDA graphs, in turns. Columns: target tokens a second, source and target tokens a second (without
padding), milliseconds a step, peak of allocated and of reserved memory in bytes, loss of the first step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from econmt.bench.rows import Row
from econmt.config.recipe import Recipe, load_recipe
from econmt.config.yaml_reader import parse_size
from econmt.data.batching.batches import Batch
from econmt.engine.graphs import GraphedStep
from econmt.engine.outside_memory import limit_workspaces, outside_meter
from econmt.engine.precision import precision_of
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_ops.core.precision import autocast_to
from econmt_ops.dispatch.capture import GraphCache
from econmt_ops.dispatch.rule import rules_only
from scripts.bench.frame import CUDA, FAILURES, Bench, brief, in_turns
from scripts.bench.plain_model import PlainModel, Sizes

WORKLOADS = {
    "W1": ("multi30k", [(64, 21, 22), (64, 10, 10), (64, 20, 17)], 6000, 6000, 0.5),
    "W2": ("iwslt", [(128, 100, 100)], 17191, 7709, 1.0),
    "GROUNDHOG": ("groundhog", [(80, 50, 50)], 17191, 7709, 1.0),
    "BEST": ("best", [(32, 100, 100)], 16000, 16000, 1.0),
    "GNMT": ("gnmt", [(128, 25, 25)], 32000, 32000, 1.0),
    "GNMT384": ("gnmt", [(384, 25, 25)], 32000, 32000, 1.0),
}
VARIANTS = ("plain", "reference", "recompute", "auto", "eager")
PRECISIONS = ("bfloat16", "tf32", "float32")


def plain_step(
    recipe: Recipe, sizes: tuple[int, int], batch: Batch, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Returns a training step of the plain model with autocast and fused Adam, which returns the loss."""
    shape, training = recipe.translation_model, recipe.training
    widths = shape.embedding, shape.encoder.size, shape.decoder.size, shape.attention.size
    tied, dropouts = shape.weight_tying != "none", (shape.dropouts.embedding, shape.dropouts.output)
    layers = shape.encoder.layers, shape.decoder.layers
    model = PlainModel(Sizes(*sizes, *widths, *layers, tied, dropouts), packed=False).to(CUDA).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True, capturable=True)
    target = torch.cat((batch.target_input[:, :1], batch.target_output), 1)
    source, lengths, target = (each.to(CUDA) for each in (batch.source, batch.source_lengths, target))
    clip: Callable[..., object] = nn.utils.clip_grad_norm_
    if training.gradient_clipping.type == "value":
        clip = nn.utils.clip_grad_value_

    def step() -> Tensor:
        with autocast_to(CUDA, dtype):
            loss = model.loss(source, lengths, target, training.label_smoothing)
        torch.autograd.backward(loss)
        clip(model.parameters(), training.gradient_clipping.threshold)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def captured_plain(step: Callable[[], Tensor]) -> Callable[[], object]:
    """Captures a plain step in a CUDA graph; the peaks of memory that follow are those of capturing it."""
    capturer = GraphCache(CUDA)
    with capturer.warming_up():
        step()
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    graph, loss = capturer.capture(step)

    def replay(_: object = (step, loss)) -> None:  # holds the tensors that the graph reads and writes
        graph.replay()

    return replay


class Run(NamedTuple):
    """Variant that is ready: its step runs the n-th batch."""

    step: Callable[[int], None]
    loss: float
    allocated: int
    reserved: int


def batches_of(task: TranslationTask, shapes: list[tuple[int, int, int]], full: float) -> list[Batch]:
    """Draws batches in which a share ``full`` of the rows has all positions, the others 60 to 100 % of them."""
    draw = torch.Generator().manual_seed(1)
    batches = []
    for shape in shapes:
        batch = task.example(Shape(*shape))
        shorter = torch.rand(shape[0], generator=draw) >= full
        shares = torch.where(shorter, 0.6 + 0.4 * torch.rand(shape[0], generator=draw), 1.0)
        lengths = [(shares * positions).ceil().long() for positions in shape[1:]]
        source, target = (
            torch.arange(size)[None] < length[:, None]
            for size, length in zip(shape[1:], lengths, strict=True)
        )
        batches.append(
            replace(
                batch,
                source=batch.source * source,
                source_lengths=lengths[0],
                target_input=batch.target_input * target,
                target_output=batch.target_output * target,
                target_lengths=lengths[1],
                source_tokens=int(source.sum()),
                target_tokens=int(target.sum()),
            )
        )
    return batches


def prepare(variant: str, task: TranslationTask, batches: list[Batch], precision: str) -> Run:
    """Builds and captures a variant, and measures the memory that it takes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    chosen = precision_of(precision, CUDA)
    torch.manual_seed(1)
    if variant == "plain":
        sizes = task.source_size, task.target_size
        with chosen.products(CUDA):
            steps = [plain_step(task.recipe, sizes, batch, chosen.dtype) for batch in batches]
            loss = float(steps[0]())
            graphs = [captured_plain(step) for step in steps]
        enqueue: Callable[[int], Any] = lambda number: graphs[number]()  # noqa: E731
    else:
        model = task.build_model().to(CUDA).train()
        implementation = variant if variant in ("reference", "recompute") else "auto"
        implementations = Implementations.everywhere(implementation, task.recipe.ops.stash)
        step = TrainingStep(task, model, chosen, implementations=implementations)
        if variant == "eager":
            on_device = [batch.to(CUDA) for batch in batches]
            tokens = [step.tokens([batch]) for batch in batches]
            loss = float(step.run([on_device[0]], tokens[0]).loss) / batches[0].target_tokens
            enqueue = lambda number: step.run([on_device[number]], tokens[number])  # noqa: E731
        else:
            graphed = GraphedStep(step, note=lambda line: print(f"  {variant}: {line}", flush=True))
            for batch in sorted(batches, key=lambda each: -each.source.numel()):
                graphed.capture(batch)
            loss = float(graphed([batches[0]]).loss) / batches[0].target_tokens
            enqueue = lambda number: graphed([batches[number]])  # noqa: E731
    for number in range(len(batches)):
        enqueue(number)
    torch.cuda.synchronize()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Run(enqueue, loss, peaks[0] - before[0], peaks[1] - before[1])


def seconds_of(runs: dict[str, Run], count: int, seconds: float) -> dict[str, float]:
    """Returns the median seconds of a pass over all batches of each variant, in turns."""
    passes = max(1, 30 // count)

    def steps(run: Run) -> None:
        for _, number in itertools.product(range(passes), range(count)):
            run.step(number)

    functions = {name: partial(steps, run) for name, run in runs.items()}
    timings = in_turns(functions, CUDA, seconds=seconds * len(runs))
    return {name: timing.median / passes for name, timing in timings.items()}


def largest(peak: Callable[[int], int], rows: int, budget: int) -> int:
    """Returns the most rows, to one in 200, whose step peaks within the budget; bytes grow almost linearly."""
    known = {count: peak(count) for count in (rows, 2 * rows)}
    for _ in range(6):
        (low, below), (high, above) = sorted(
            sorted(known.items(), key=lambda each: abs(each[1] - budget))[:2]
        )
        wanted = max(1, int(low + (budget - below) * (high - low) / (above - below)))
        if wanted in known:
            break
        known[wanted] = peak(wanted)
        if known[wanted] <= budget < 1.005 * known[wanted]:
            break
    return max(count for count, size in known.items() if size <= budget)


def batches_within(
    budget: int, variant: str, task: TranslationTask, shape: tuple[int, int, int], full: float, precision: str
) -> list[Batch]:
    """Returns one batch of a shape with as many rows as the budget allows."""

    def of(rows: int) -> list[Batch]:
        return batches_of(task, [(rows, *shape[1:])], full)

    return of(largest(lambda rows: prepare(variant, task, of(rows), precision).allocated, shape[0], budget))


def rows(workload: str, precision: str, given: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of all variants of a workload, those that fail first."""
    recipe_name, shapes, source, target, full = WORKLOADS[workload]
    task = TranslationTask(load_recipe(recipe_name, given.set), source, target)
    torch.manual_seed(2)
    batches = batches_of(task, shapes, full)
    runs: dict[str, Run] = {}
    batches_of_variant: dict[str, list[Batch]] = {}
    for variant in given.variants:
        model = task.recipe.translation_model
        if variant == "plain" and (not model.decoder.input_feeding or model.layer_normalization):
            continue
        try:
            batches_of_variant[variant] = batches
            if given.budget is not None:
                batches_of_variant[variant] = batches_within(
                    given.budget, variant, task, shapes[0], full, precision
                )
            runs[variant] = prepare(variant, task, batches_of_variant[variant], precision)
        except FAILURES as error:
            yield {"workload": workload, "precision": precision, "variant": variant, "failure": brief(error)}
    count = 1 if given.budget is not None else len(batches)
    for variant, seconds in seconds_of(runs, count, given.seconds).items() if runs else ():
        run, own_batches = runs[variant], batches_of_variant[variant]
        tokens = sum(batch.target_tokens for batch in own_batches)
        both = tokens + sum(batch.source_tokens for batch in own_batches)
        row: Row = {"workload": workload, "precision": precision, "variant": variant}
        row |= {"rows": len(own_batches[0].source), "target tokens/s": tokens / seconds}
        row |= {"source and target tokens/s": both / seconds, "milliseconds": f"{1e3 * seconds / count:.2f}"}
        yield row | {"peak bytes": run.allocated, "reserved bytes": run.reserved, "loss": f"{run.loss:.4f}"}


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, seconds=2.0)
    add = bench.add_argument
    add("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="workloads")
    add("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="precisions")
    add("--variants", nargs="+", choices=VARIANTS, default=["plain", "reference", "auto"], help="variants")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the recipes to change")
    add("--budget", type=parse_size, help="give each variant the largest batch within these bytes, e.g. 4GiB")
    given = bench.begin(words)
    bench.device = CUDA
    for precision in given.precision if len(given.precision) == 1 else ():
        limit_workspaces(precision)  # for all variants
    outside_meter(CUDA)
    bench.print_header()
    for name, precision in itertools.product(given.only, given.precision):
        with rules_only():  # as econmt train: one implementation for all shapes
            bench.report(rows(name, precision, given), f"{name}, {precision}")
        gc.collect()
