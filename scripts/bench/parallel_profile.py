"""Times that :mod:`scripts.bench.cost_model` predicts from, measured on this machine with a recipe."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from econmt.bench.training import vocabulary_sizes
from econmt.config.conditions import conflicts
from econmt.config.json_reader import Record, json_text, read_json
from econmt.config.recipe import LanguageModelSection, Recipe
from econmt.config.yaml_reader import leaves
from econmt.data.batching.batch import AnyBatch
from econmt.data.files import write_atomically
from econmt.engine.graphs import GraphedStep
from econmt.engine.precision import Precision, precision_of
from econmt.engine.step import TrainingStep
from econmt.engine.threads import usable_cores
from econmt.errors import InputError
from econmt.estimate.measurement import measure_step
from econmt.model import Implementations
from econmt.parallel.pipeline.costs import timed_stacks
from econmt.parallel.pipeline.partition import Link
from econmt.parallel.reduction import travelling
from econmt.tasks.protocol import Shape, Task
from econmt.tasks.registry import task_of_sizes
from econmt.training.choice import settle
from econmt_ops.dispatch.measurements import processor
from econmt_ops.dispatch.rule import captured
from econmt_ops.dispatch.timing import quantile, synchronizer
from scripts.bench.cost_model import Network, Stack, StepProfile
from scripts.bench.parallel_processes import together

SMALL, LARGE = 8, 4 << 20
"""Bytes of the messages by which latency and bandwidth are told apart."""

EXCHANGES = 12
"""Exchanges of each size that are timed; the median counts."""

HALVES = 4
"""Numbers of rows that are timed: the whole batch, and halves of it."""

TURNS = 3
"""Times that each number of rows is timed, in turns; the quickest counts."""

LEAST = 3
"""Updates that are timed however long they take."""

TIMEOUT = timedelta(seconds=120)
"""Time after which a rank gives up waiting for another."""

LinkName = Literal["1gbe", "10gbe", "ndr"]
BETWEEN: dict[LinkName, Link] = {
    "1gbe": Link(50e-6, 8e-9),
    "10gbe": Link(30e-6, 0.8e-9),
    "ndr": Link(2e-6, 0.02e-9),
}
"""Links between hosts by their nominal bandwidth: Ethernet of 1 and 10 Gbit/s, InfiniBand NDR of 400 Gbit/s."""


class Profile(Record):
    """Measured times of a recipe on a machine; the file of ``--profile``.

    Attributes:
        recipe: Name of the recipe.
        batch: Rows of its batch.
        length: Positions of a row.
        device: cpu or cuda.
        processor: Name of the processor or GPU.
        ranks: Number of ranks that worked at once.
        hosted: Largest number of ranks on this machine.
        alone, rows, seconds, shared, gradient_bytes, stacks: See :class:`scripts.bench.cost_model.StepProfile`.
        latency, byte: Link between two ranks as an all-reduce finds it, seconds and seconds a byte.
    """

    recipe: str
    batch: int
    length: int
    device: str
    processor: str
    ranks: int
    hosted: int
    alone: float
    rows: list[int]
    seconds: list[float]
    shared: float
    gradient_bytes: float
    stacks: list[Stack]
    latency: float
    byte: float

    @property
    def step(self) -> StepProfile:
        """Times of one rank's update."""
        rows, seconds, stacks = tuple(self.rows), tuple(self.seconds), tuple(self.stacks)
        return StepProfile(self.alone, rows, seconds, self.shared, self.gradient_bytes, stacks)

    def network(self, between: LinkName | None) -> Network:
        """Returns a network of hosts like this one, joined by a link of :data:`BETWEEN`."""
        on_gpu = self.device == "cuda"
        link = BETWEEN[between or ("ndr" if on_gpu else "10gbe")]
        return Network(self.hosted, Link(self.latency, self.byte), link, on_gpu)


def read_profile(path: Path) -> Profile:
    """Reads the file of an earlier measurement; raises InputError if it is no profile."""
    read = read_json(Profile, path, "measure anew: give another file")
    if not read.rows or len(read.rows) != len(read.seconds) or read.rows != sorted(set(read.rows)):
        raise InputError(f"{path}: rows do not rise, or have no time each; measure anew: give another file")
    return read


def write_profile(path: Path, measured: Profile) -> None:
    """Writes a profile; raises InputError if that fails."""
    try:
        write_atomically(path, json_text(measured.model_dump(), indent=1).encode())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


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


def why_undivided(recipe: Recipe, stages: int) -> str:
    """Returns why a recipe cannot be trained as a pipeline of so many stages; empty if it can."""
    return next(conflicts(dict(leaves(divided(recipe, stages)))), "")


def divided(recipe: Recipe, stages: int) -> Recipe:
    """Returns the recipe with a pipeline of so many stages."""
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"pipeline": stages})})


def profile(setting: Setting, ranks: int) -> Profile:
    """Measures the times of a prediction with so many ranks; raises EconmtError if a rank fails."""
    limit = HALVES * TURNS * setting.limit
    measured, *_ = together(_profile, setting.settled(), ranks, setting.threads, limit)
    hosted = torch.cuda.device_count() if setting.device == "cuda" else usable_cores() // setting.threads
    record = {
        **measured, "recipe": setting.recipe.name, "batch": setting.rows, "length": setting.length,
        "device": setting.device, "ranks": ranks, "hosted": max(hosted, ranks),
    }  # fmt: skip
    return Profile.model_validate(json.loads(json_text(record)))


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


class Updates:
    """Updates of a recipe in one process.

    Args:
        setting: Setting with its implementations.
        device: Device of this process.
    """

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.setting, self.device = setting, device
        precision, chosen = setting.precision_on(device), setting.implementations
        self.step = TrainingStep(setting.task, setting.model(device), precision, implementations=chosen)
        self._timed = timed_update(self.step, device)

    def batch(self, rows: int) -> AnyBatch:
        """Returns a batch of full rows of random ids, on the CPU."""
        return self.step.task.example(self.setting.shape._replace(rows=rows))

    def seconds(self, rows: int, budget: float) -> float:
        """Returns the lowest decile of the seconds of updates, timed for about ``budget`` seconds.

        Other work on a machine only adds to times, and not to all alike.
        """
        batch = self.batch(rows)
        times: list[float] = []
        while len(times) < LEAST + 2 or sum(times[2:]) < budget:
            times.append(self._timed(batch, batch.target_tokens))
        return quantile(times[2:], 0.1)

    def shared(self, rows: int, update: float) -> float:
        """Returns the part of an update's seconds that the output layer and the optimizer take.

        On a CPU it comes from an update with marks between its layers. On a GPU, where an update is one graph, it is 0.
        """
        if self.device.type != "cpu":
            return 0.0
        spent = measure_step(self.step, self.batch(rows), timed=True).milliseconds
        shared = sum(
            each for (phase, layer), each in spent.items() if phase == "optimizer" or layer == "output"
        )
        return update * shared / sum(spent.values())


def _profile(setting: Setting) -> dict[str, Any]:
    """Measures times; each rank runs this, and the first returns the result."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    device = setting.device_of(rank)
    updates, budget = Updates(setting, device), setting.seconds / TURNS
    rows = sorted({max(1, setting.rows // 2**power) for power in range(HALVES)})
    alone, busy = [0.0] * TURNS, [[0.0] * len(rows) for _ in range(TURNS)]
    for turn in range(TURNS):
        if rank == 0:
            alone[turn] = updates.seconds(rows[-1], budget)
        for number, count in enumerate(rows):
            dist.barrier()
            busy[turn][number] = updates.seconds(count, budget)
    times = torch.tensor(busy, dtype=torch.float64).amin(0)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    result: dict[str, Any] = {"alone": min(alone), "rows": rows, "seconds": times.tolist()}
    if rank == 0:
        stacks: list[Stack] = []
        if not why_undivided(setting.recipe, 2):
            with captured(device.type == "cuda"):
                step = updates.step
                stacks = [
                    Stack(*stack)
                    for stack in timed_stacks(step.model, setting.shape, step.precision, step.implementations)
                ]
        result["stacks"] = stacks
        result["shared"] = updates.shared(rows[-1], result["alone"])
        parameters = sum(each.numel() for each in updates.step.model.parameters() if each.requires_grad)
        result["gradient_bytes"] = parameters * travelling(setting.recipe.parallel).itemsize
        result["processor"] = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    dist.barrier()
    group = dist.new_group(backend="nccl", device_id=device) if device.type == "cuda" else None
    result["latency"], result["byte"] = _link(device, group)
    dist.barrier()
    dist.destroy_process_group()
    return result if rank == 0 else {}


def _link(device: torch.device, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Returns latency and seconds a byte with which a ring takes as long as an all-reduce of all ranks does."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return 0.0, 0.0
    medians = []
    for size in (SMALL, LARGE):
        exchange: Callable[[], object] = partial(
            dist.all_reduce, torch.zeros(size // 4, device=device), group=group
        )
        times = []
        for _ in range(EXCHANGES + 2):
            dist.barrier()
            began = time.perf_counter()
            exchange()
            synchronizer(device)()
            times.append(time.perf_counter() - began)
        medians.append(quantile(times[2:], 0.5))
    messages = 2 * (ranks - 1)
    return medians[0] / messages, max(0.0, medians[1] - medians[0]) / messages / (LARGE / ranks)
