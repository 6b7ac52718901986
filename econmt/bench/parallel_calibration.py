"""What a prediction for this machine needs, measured on it: times of layers, links, how ranks slow each other down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from econmt.bench.parallel_hardware import LINKS
from econmt.bench.parallel_processes import Job, together
from econmt.bench.parallel_profile import Alone, chosen_by_auto, measured_profile
from econmt.config.json_reader import Record, json_text, read_json
from econmt.config.recipe import Recipe
from econmt.data.files import write_atomically
from econmt.engine.precision import precision_of
from econmt.engine.threads import usable_cores
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.parallel.cost_layers import Layer, Profile, Side, Unit
from econmt.parallel.cost_network import Link, Machine
from econmt_ops.dispatch.measurements import processor
from econmt_ops.dispatch.timing import quantile, synchronizer

SMALL, LARGE = 8, 4 << 20
"""Bytes of the messages by which latency and bandwidth are told apart."""

EXCHANGES = 12
"""Exchanges of each size that are timed; the median counts."""

HALVES = 4
"""The whole batch, and how often it is halved for fewer rows, whose times are measured."""

TIMEOUT = timedelta(seconds=120)
"""After which a rank gives up waiting for another."""


class LayerRecord(Record):
    """A :class:`econmt.parallel.cost_layers.Layer`."""

    name: str
    side: Side
    node: str
    parameters: float
    unit: Unit
    forward: list[list[float]]
    backward: list[list[float]]
    call: list[float]
    whole: bool
    width: int
    kept: float
    gather: list[list[float]]
    once: float


class LinkRecord(Record):
    """A :class:`econmt.parallel.cost_network.Link`."""

    latency: float
    bandwidth: float


class Calibration(Record):
    """What was measured on a machine with a recipe; the file of ``--profile``.

    Attributes:
        recipe, batch, length: of which run, rows and positions.
        device: cpu or cuda. processor: on which machine.
        ranks: that worked at once. hosted: ranks that the machine has room for.
        layers, update, overhead, value_bytes, gradient_bytes, state_bytes, tied: see
            :class:`econmt.parallel.cost_layers.Profile`.
        reduction, messages: links as an all-reduce and as messages between two ranks find them.
        crowding: see :class:`econmt.parallel.cost_network.Machine`.
    """

    recipe: str
    batch: int
    length: int
    device: str
    processor: str
    ranks: int
    hosted: int
    layers: list[LayerRecord]
    update: float
    overhead: float
    value_bytes: int
    gradient_bytes: int = 4
    state_bytes: int
    tied: str
    reduction: LinkRecord
    messages: LinkRecord
    crowding: list[list[float]]

    @property
    def sides(self) -> int:
        """2 where there is a source, else 1."""
        return len({layer.side for layer in self.layers})

    @property
    def profile(self) -> Profile:
        """The model on one rank."""
        layers = tuple(
            Layer(
                each.name,
                each.side,
                each.node,
                each.parameters,
                each.unit,
                tuple((x, y) for x, y in each.forward),
                tuple((x, y) for x, y in each.backward),
                (each.call[0], each.call[1]),
                each.whole,
                each.width,
                each.kept,
                tuple((x, y) for x, y in each.gather),
                each.once,
            )
            for each in self.layers
        )
        return Profile(
            layers,
            self.update,
            self.overhead,
            value_bytes=self.value_bytes,
            gradient_bytes=self.gradient_bytes,
            state_bytes=self.state_bytes,
            tied=self.tied,
        )

    def machine(self, between: str | None) -> Machine:
        """This machine, and more like it, joined by a link of :data:`econmt.bench.parallel_hardware.LINKS`."""
        on_gpu = self.device == "cuda"
        messages = Link("messages here", self.messages.latency, self.messages.bandwidth)
        return Machine(
            "this machine",
            self.hosted,
            Link("here", self.reduction.latency, self.reduction.bandwidth),
            LINKS[between or ("ndr" if on_gpu else "10gbe")],
            overlaps=on_gpu,
            crowding=tuple((ranks, factor) for ranks, factor in self.crowding),
            messages=messages,
        )


def read_calibration(path: Path) -> Calibration:
    """What an earlier command measured.

    Raises:
        InputError: the file is none of them.
        FileNotFoundError: there is no such file.
    """
    found = read_json(Calibration, path, "measure anew: give another file")
    for layer in found.layers:
        for points in (layer.forward, layer.backward, layer.gather):
            places = [point[0] for point in points if len(point) == 2]
            if not points or len(places) != len(points) or places != sorted(set(places)):
                raise InputError(
                    f"{path}: layers: {layer.name} has no rising points; measure anew: give another file"
                )
    return found


def write_calibration(path: Path, found: Calibration) -> None:
    """Keeps what was measured.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        write_atomically(path, json_text(found.model_dump(), indent=1).encode())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


class Setting(NamedTuple):
    """What is measured, and how.

    Attributes:
        recipe: the run. rows, length: of the whole batch, all rows full.
        grown: whether the batch has as many times its rows as there are processes.
        device: cpu or cuda, a GPU a process. threads: of each process. precision: by name.
        seconds: for each thing that is timed. limit: after which processes that time one thing are ended.
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

    def implementations(self) -> Implementations:
        """The ops that a run of this shape would use: measured on the CPU, by the rule in CUDA graphs."""
        return chosen_by_auto(self.recipe, self.rows, self.length, self.device, self.precision)


def calibrate(setting: Setting, ranks: int) -> Calibration:
    """Measures here what a prediction needs.

    Args:
        setting: what is predicted.
        ranks: that work at once.

    Raises:
        EconmtError: a rank failed, or they were not ready in time.
    """
    sizes = sorted({max(1, setting.rows // 2**power) for power in range(HALVES)})
    job = {
        "recipe": setting.recipe.model_dump(mode="json"),
        "length": setting.length,
        "rows": sizes,
        "device": setting.device,
        "precision": setting.precision,
        "implementations": list(setting.implementations()),
        "seconds": setting.seconds,
    }
    found = together(_calibrate, job, ranks, setting.threads, HALVES * setting.limit)
    on_gpu = setting.device == "cuda"
    hosted = torch.cuda.device_count() if on_gpu else usable_cores() // setting.threads
    whole = {
        **found[0],
        "recipe": setting.recipe.name,
        "batch": setting.rows,
        "length": setting.length,
        "device": setting.device,
        "ranks": ranks,
        "hosted": max(hosted, ranks),
    }
    return Calibration.model_validate(json.loads(json_text(whole)))


def _calibrate(job: Job) -> Job:
    """In each rank."""
    recipe = Recipe.model_validate(job["recipe"])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if job["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone = Alone(
        recipe,
        device,
        precision_of(job["precision"], device, [recipe]),
        Implementations(*job["implementations"]),
    )
    found: dict[str, Any] = {}
    if rank == 0:
        profile = measured_profile(alone, job["rows"], job["length"], job["seconds"])
        found = {**profile._asdict(), "layers": [layer._asdict() for layer in profile.layers]}
        found["processor"] = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    dist.barrier()
    share = max(1, job["rows"][-1] // ranks)
    found["crowding"] = [[1.0, 1.0], *_crowding(alone, share, job["length"], job["seconds"])]
    group = dist.new_group(backend="nccl", device_id=device) if device.type == "cuda" else None
    found["reduction"] = _reduction(device, group)
    found["messages"] = _messages(device, group)
    dist.barrier()
    dist.destroy_process_group()
    return found if rank == 0 else {}


def _crowding(alone: Alone, rows: int, length: int, budget: float) -> list[list[float]]:
    """For 2, 4, 8, ... ranks and for all: how many times as long an update takes when so many are busy at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for busy in sorted({*(2**power for power in range(1, 20) if 2**power < ranks), ranks} - {1}):
        times: dict[bool, list[float]] = {False: [], True: []}
        for crowded in (False, True, False, True):
            dist.barrier()
            if rank < (busy if crowded else 1):
                times[crowded].append(alone.seconds(rows, length, budget / 2))
        slowest = torch.tensor([min(times[True], default=0.0)], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        single = torch.tensor([min(times[False], default=0.0)], dtype=torch.float64)
        dist.broadcast(single, 0)
        found.append([float(busy), max(1.0, slowest.item() / single.item())])
    return found


def _timed(exchange: Callable[[], object], device: torch.device) -> float:
    synchronize = synchronizer(device)
    times = []
    for number in range(EXCHANGES + 2):
        dist.barrier()
        began = time.perf_counter()
        exchange()
        synchronize()
        if number >= 2:
            times.append(time.perf_counter() - began)
    return quantile(times, 0.5)


def _reduction(device: torch.device, group: dist.ProcessGroup | None) -> dict[str, float]:
    """Latency and bandwidth with which a ring would take as long as an all-reduce of all ranks does."""
    ranks = dist.get_world_size()
    times = []
    for size in (SMALL, LARGE):
        tensor = torch.zeros(size // 4, device=device)
        times.append(_timed(partial(dist.all_reduce, tensor, group=group), device))
    messages = 2 * (ranks - 1)
    return _link(times[0] / messages, times[1] / messages, LARGE / ranks)


def _messages(device: torch.device, group: dist.ProcessGroup | None) -> dict[str, float]:
    """Of messages between the first two ranks, there and back; the others wait."""
    rank = dist.get_rank()
    times = []
    for size in (SMALL, LARGE):
        tensor = torch.zeros(size // 4, device=device)

        def there_and_back(tensor: torch.Tensor = tensor) -> None:
            if rank == 0:
                dist.send(tensor, 1, group=group)
                dist.recv(tensor, 1, group=group)
            elif rank == 1:
                dist.recv(tensor, 0, group=group)
                dist.send(tensor, 0, group=group)

        times.append(_timed(there_and_back, device) / 2.0)
    return _link(times[0], times[1], LARGE)


def _link(small: float, large: float, size: float) -> dict[str, float]:
    """Of what a message of a few bytes takes, and one of ``size`` bytes."""
    return {"latency": small, "bandwidth": size / max(1e-9, large - small)}
