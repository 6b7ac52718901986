"""Measures gains of several processes.

    python -m scripts.bench parallel iwslt --processes 1,2 --batch grown

Times updates that several processes share, each with --threads of its own (1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from econmt.bench.rows import Row, Say
from econmt.bench.training import vocabulary_sizes
from econmt.config import limits
from econmt.config.conditions import conflicts
from econmt.config.recipe import LanguageModelSection, Recipe, load_recipe
from econmt.config.yaml_reader import leaves
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.batches import rows_of_batch
from econmt.engine.communicator import Communicator
from econmt.engine.devices import peak_memory
from econmt.engine.graphs import GraphedStep
from econmt.engine.precision import Precision, precision_of, precision_of_run
from econmt.engine.step import TrainingStep
from econmt.errors import EconmtError, InputError
from econmt.model import Implementations
from econmt.parallel.processes import joined
from econmt.parallel.rank_environment import rank_environment
from econmt.tasks.protocol import Shape, Task
from econmt.tasks.registry import task_of_sizes
from econmt.training.choice import settle
from econmt.training.pipelines import make_pipeline
from econmt_memory.measure.patches import patched
from econmt_ops.dispatch.timing import quantile, synchronizer
from scripts.bench.frame import Bench
from scripts.bench.parallel_processes import together

Kind = Literal["data", "pipeline"]
KINDS: tuple[Kind, ...] = ("data", "pipeline")
FULL_LENGTH = 50
"""Positions of a row of a translation recipe's batch, if none is given."""
ROUNDS = 2
"""Number of times that each way is measured, in turns and by new processes; the faster counts."""

WARM_UP = 3
"""Updates before the first that is timed."""

QUICK = 0.1
"""Quantile of the updates that counts: other work on a machine only adds to times, and not to all alike."""

LEAST = 5
"""Updates that are timed however long they take."""


class Setting(NamedTuple):
    """Conditions of a measurement.

    Attributes:
        recipe: Recipe whose updates are timed.
        rows: Rows of the whole batch, all of them full.
        length: Positions of a row.
        grown: True if the batch has as many times its rows as there are processes.
        device: cpu or cuda, a GPU for each process.
        threads: CPU threads of each process.
        precision: Name of the precision.
        seconds: Seconds for each thing that is timed.
        limit: Seconds after which processes that time one thing are ended.
        implementations: Implementations of the operations, once they are chosen.
    """

    recipe: Recipe
    rows: int
    length: int
    grown: bool
    device: str
    threads: int
    precision: str
    seconds: float
    limit: float
    implementations: Implementations | None = None

    @property
    def shape(self) -> Shape:
        """Shape of the full rows, with one source position where there is no source."""
        is_text = isinstance(self.recipe.model, LanguageModelSection)
        return Shape(self.rows, 1 if is_text else self.length, self.length)

    @property
    def task(self) -> Task:
        """Task of the recipe."""
        return task_of_sizes(self.recipe, vocabulary_sizes(self.recipe))

    def precision_on(self, device: torch.device) -> Precision:
        """Returns the precision on a device."""
        return precision_of(self.precision, device, [self.recipe])

    def settled(self) -> Setting:
        """Returns the setting with the implementations that a run of this shape chooses."""
        device, task = torch.device(self.device), self.task
        precision = self.precision_on(device)
        chosen, *_ = settle(task, lambda: task.build_model().to(device), self.shape, device, precision)
        return self._replace(implementations=chosen)

    def model(self, device: torch.device) -> torch.nn.Module:
        """Returns a model on a device, the same one in every process."""
        torch.manual_seed(self.recipe.training.seed)
        return self.task.build_model().to(device).train()

    def device_of(self, rank: int) -> torch.device:
        """Returns the device of a rank, which becomes the current one of its process if it is a GPU."""
        if self.device == "cpu":
            return torch.device("cpu")
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)


def divided(recipe: Recipe, stages: int) -> Recipe:
    """Returns the recipe with a pipeline of so many stages."""
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"pipeline": stages})})


def timed_update(step: TrainingStep, device: torch.device) -> Callable[[AnyBatch, int], float]:
    """Returns a function that runs an update as a run does, on a GPU in a CUDA graph, and gives its seconds.

    The function takes a batch and the number of target tokens by which its loss is divided.
    """
    synchronize = synchronizer(device)
    graphed = GraphedStep(step) if device.type == "cuda" else None

    def timed(batch: AnyBatch, tokens: int) -> float:
        began = time.perf_counter()
        if graphed is None:
            step.run([batch], step.tokens([batch], tokens))
        else:
            graphed([batch], None, tokens)
        synchronize()
        return time.perf_counter() - began

    return timed


class Way(NamedTuple):
    """Number of processes, and division of updates among them by rows (data) or by layers (pipeline)."""

    processes: int
    kind: Kind

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.processes if self.kind == "pipeline" else 1

    @property
    def division(self) -> str:
        """Name for tables, such as "2 stages"."""
        if self.processes == 1:
            return "alone"
        return f"{self.processes} {'stages' if self.kind == 'pipeline' else 'data'}"


def ways(processes: Sequence[int], kinds: Sequence[Kind]) -> list[Way]:
    """Returns one process alone, then the kinds of division of each number of several processes."""
    several = [count for count in processes if count > 1]
    return [Way(1, "data"), *(Way(count, kind) for count in several for kind in kinds)]


def rows(setting: Setting, wanted: Sequence[Way], say: Say) -> Iterator[Row]:
    """Yields the row of each way, measured in turns; a way that fails has a column ``failure``.

    The first way is one process alone, over which gains are computed.
    """
    measured: dict[Way, list[dict[str, Any]]] = {way: [] for way in wanted}
    failures = {}
    for way in wanted:
        for why in conflicts(dict(leaves(divided(setting.recipe, way.stages)))):
            failures.setdefault(way, why)
    setting = setting.settled()
    for turn in range(1, ROUNDS + 1):
        for way in wanted:
            if way not in failures:
                say(f"{setting.recipe.name}: {way.division}, round {turn} of {ROUNDS}")
                try:
                    measured[way].append(_measured(setting, way))
                except EconmtError as error:
                    failures[way] = str(error)
    alone = 0.0
    for way in wanted:
        row = _row(setting, way)
        if way in failures:
            yield {**row, "failure": failures[way]}
            continue
        quickest = min(measured[way], key=lambda each: float(each["seconds"]))
        rate = quickest["tokens"] / quickest["seconds"]
        alone = alone or (rate if way.processes == 1 else 0.0)
        row |= {
            "milliseconds": 1e3 * quickest["seconds"],
            "tokens/s": rate,
            "MB sent": quickest["sent"] / 1e6,
            "peak MB": quickest["peak"] / 1e6,
            "samples": sum(each["samples"] for each in measured[way]),
        }
        if alone:
            row["scaling"] = rate / alone
        if "exchange" in quickest:
            row["exchange %"] = max(0.0, 100.0 * quickest["exchange"])
        yield row


def _row(setting: Setting, way: Way) -> Row:
    return {
        "recipe": setting.recipe.name,
        "batch": "grown" if setting.grown else "fixed",
        "rows": _rows(setting, way),
        "length": setting.length,
        "precision": setting.precision,
        "ranks": way.processes,
        "division": way.division,
    }


def _rows(setting: Setting, way: Way) -> int:
    return setting.rows * (way.processes if setting.grown else 1)


def _measured(setting: Setting, way: Way) -> dict[str, Any]:
    of_way = setting._replace(recipe=divided(setting.recipe, way.stages), rows=_rows(setting, way))
    of_ranks = together(_work, of_way, way.processes, setting.threads, setting.limit)
    return {**of_ranks[0], **{name: max(each[name] for each in of_ranks) for name in ("peak", "sent")}}


def _work(setting: Setting) -> dict[str, Any]:
    """Measures updates; each rank runs this."""
    environment = rank_environment()
    assert environment is not None
    device = setting.device_of(environment.rank)
    if environment.size == 1:
        return _time(setting, device, Communicator())
    with joined(environment, setting.recipe.parallel, device) as communicator:
        return _time(setting, device, communicator)


def _time(setting: Setting, device: torch.device, communicator: Communicator) -> dict[str, Any]:
    precision, how = setting.precision_on(device), setting.implementations
    task, model, stages = setting.task, setting.model(device), setting.recipe.parallel.pipeline
    assert how is not None
    full_batch = task.example(setting.shape)
    tokens = full_batch.target_tokens
    if stages > 1:
        communicator.stages = stages
        batch = full_batch.share(communicator.replica, communicator.replicas)
        own_shape = setting.shape._replace(rows=len(batch.indices))
        step, _, _ = make_pipeline(task, model, own_shape, precision, communicator, {}, how)
    else:
        batch = full_batch.share(communicator.rank, communicator.size)
        step = TrainingStep(task, model, precision, implementations=how, communicator=communicator)
    with _counting() as sent:
        step.run([batch.to(device)], step.tokens([batch], tokens))
    step.clear()
    updates = {"together": partial(timed_update(step, device), batch, tokens)}
    if communicator.size > 1 and communicator.stages == 1:
        alone = TrainingStep(task, model, precision, implementations=how, optimizer=step.optimizer)
        updates["without"] = partial(timed_update(alone, device), batch, batch.target_tokens)
    times = _in_turns(updates, setting.seconds, communicator)
    seconds = quantile(times["together"], QUICK)
    result = {"seconds": seconds, "tokens": tokens, "samples": len(times["together"])}
    result |= {"sent": sum(sent), "peak": peak_memory(device)}
    if "without" in times:
        result["exchange"] = 1.0 - quantile(times["without"], QUICK) / seconds
    return result


def _in_turns(
    updates: Mapping[str, Callable[[], float]], seconds: float, communicator: Communicator
) -> dict[str, list[float]]:
    """Times updates for about ``seconds``: five of one kind, then five of the other, as many on all ranks."""
    for update in updates.values():
        for _ in range(WARM_UP):
            update()
    trial = sum(update() for update in updates.values())
    (turns,) = communicator.all_reduce_max(max(1, round(seconds / max(trial, 1e-9) / LEAST)))
    times: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(turns):
        for name, update in updates.items():
            update()  # the first of a kind finds ranks where the last of the other left them
            times[name] += [update() for _ in range(LEAST)]
    return times


@contextmanager
def _counting() -> Iterator[list[float]]:
    """Notes the bytes that this rank sends through torch.distributed."""
    sent = list[float]()
    before = {name: getattr(dist, name) for name in _SHARES}

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensor = arguments[1] if name == "all_gather" else arguments[0]
            sent.append(_SHARES[name](dist.get_world_size(options.get("group"))) * tensor.nbytes)
            return before[name](*arguments, **options)

        return call

    with patched(dist, **{name: counted(name) for name in _SHARES}):
        yield sent


_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 2.0 * (size - 1) / size,
    "all_gather": lambda size: size - 1.0,
    "broadcast": lambda size: (size - 1.0) / size,
    "reduce": lambda size: (size - 1.0) / size,
    "isend": lambda _: 1.0,
}
"""Bytes that a rank sends by exchange, relative to its tensor, over a ring of so many ranks."""


def numbers_of(text: str) -> list[int]:
    """Reads whole numbers from 1, such as "1,2,4"; raises ValueError for any other text."""
    numbers = sorted({int(part) for part in text.split(",")})
    if numbers[0] < 1 or numbers[-1] > limits.THREADS:
        raise ValueError(text)
    return numbers


def kinds_of(text: str) -> list[Kind]:
    """Reads kinds of division, such as "data,pipeline"; raises ValueError if one is unknown."""
    names = [KINDS[KINDS.index(name)] for name in text.split(",")]
    return [kind for kind in KINDS if kind in names]


def _check_gpus(device: torch.device, processes: int) -> None:
    """Raises InputError if the processes cannot have a GPU each."""
    if device.type != "cuda":
        return
    if str(device) != "cuda":
        raise InputError(f"--device {device}: each process has a GPU of its own; give cuda")
    if processes > torch.cuda.device_count():
        raise InputError(
            f"--processes {processes}: this machine has {torch.cuda.device_count()} GPUs; give fewer"
        )


def _full_rows(recipe: Recipe, length: int | None) -> tuple[int, int]:
    """Returns rows and positions of a batch without padding."""
    if isinstance(recipe.model, LanguageModelSection):
        return recipe.training.batch.size, length or recipe.training.bptt
    positions = length or FULL_LENGTH
    return rows_of_batch(recipe.training.batch, positions), positions


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto", seconds=5.0, threads=1)
    add = bench.add_argument
    add("recipe", help="recipe: a file, or a shipped name")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the recipe")
    add("--processes", type=numbers_of, default=[1, 2], metavar="N,N,...", help="processes (%(default)s)")
    text = "ways to divide: data, pipeline (of layers); default: both"
    add("--division", type=kinds_of, default=list(KINDS), metavar="WAY,...", help=text)
    add("--batch", choices=("fixed", "grown"), default="fixed", help="the recipe's, or that for each rank")
    add("--length", type=int, help="positions of a row; no row has padding (50, or bptt)")
    add("--limit", type=float, default=180.0, help="seconds after which a measurement is given up")
    given = bench.begin(words)
    _check_gpus(given.device, max(given.processes))
    recipe = load_recipe(given.recipe, given.overrides)
    precision = precision_of_run(recipe, given.device).name
    grown = given.batch == "grown"
    setting = Setting(
        recipe,
        *_full_rows(recipe, given.length),
        grown,
        given.device.type,
        given.threads,
        precision,
        given.seconds,
        given.limit,
    )
    title = f"{recipe.name}, batch {given.batch}, {precision}"
    bench.print_header(title)
    figures = ("milliseconds", "tokens/s", "scaling", "exchange %", "MB sent", "peak MB")
    measured = rows(setting, ways(given.processes, given.division), bench.say)
    bench.report(measured, title, ("division", "rows", *figures))
