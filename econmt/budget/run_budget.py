"""Memory budget of a run: its plan, made before the first update or taken over from a saved state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch

from econmt.budget.planner import MemoryPlan, Planner, beside, estimator, sufficient_budget, usable
from econmt.budget.prices import settings
from econmt.checkpoint.state import TrainingState
from econmt.config.recipe import Recipe
from econmt.config.section import NO_MEMORY, marked_keys
from econmt.config.yaml_reader import leaves, parse_size
from econmt.data.batching.batch import AnyBatch, Batches
from econmt.data.batching.store import PreparedData
from econmt.decoding.search.beam import MAX_OUTPUT_EXTRA
from econmt.engine.communicator import Communicator, rows_of_share
from econmt.engine.machine import total_memory
from econmt.engine.optimizers import make_optimizer
from econmt.engine.outside_memory import outside_meter
from econmt.engine.parameters import prepare_parameters
from econmt.engine.precision import Precision
from econmt.errors import InputError, TrainingError
from econmt.estimate.beam_search import estimate_search, search_rows
from econmt.estimate.byte_budget import budget_bytes, nearest_budget, size_text
from econmt.model import Implementations
from econmt.parallel.sharding import largest_share
from econmt.parallel.simulated_rank import ranks_that_differ
from econmt.tasks.protocol import Shape, Task
from econmt.tasks.registry import make_task
from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.optimizers.fused import FusedOptimizer


def divide(
    batch: AnyBatch, plan: MemoryPlan | None, implementations: Implementations, ranks: int = 1
) -> list[tuple[AnyBatch, Implementations]]:
    """Splits a batch of all ranks into micro-batches, each with the implementations of its ops, as planned.

    Without a plan, the batch stays whole and uses the given ``implementations``.
    """
    if plan is None:
        return [(batch, implementations)]
    entry = plan.find(batch)
    return [(part, entry.implementations) for part in batch.split(entry.rows * ranks)]


def first_plan(
    recipe: Recipe,
    prepared: PreparedData,
    device: torch.device,
    precision: Precision,
    communicator: Communicator,
) -> MemoryPlan | None:
    """Returns the plan that a new run would begin with; None without a memory budget.

    Raises:
        InputError: The budget does not suffice for one sentence.
    """
    if recipe.training.memory_budget is None:
        return None
    task = make_task(recipe, prepared)
    batches = task.batches(prepared)
    with torch.device("meta"):
        model = task.build_model()
    prepare_parameters(model, recipe.training)
    budget = Budget(task, prepared, batches, device, precision, model.parameters(), communicator)
    budget.make(TrainingState(), 0)
    return budget.plan


@dataclass
class Budget:
    """Keeps a run within the memory budget of its recipe, if there is one; each rank has its own.

    ``parameters`` includes frozen ones, whose ``requires_grad`` is False.

    Attributes:
        plan: None before :meth:`make`, or if the recipe has no budget.
        notes: Messages about changes of the plan, one line each.
    """

    task: Task
    prepared: PreparedData
    batches: Batches[AnyBatch]
    device: torch.device
    precision: Precision
    parameters: InitVar[Iterable[torch.Tensor]]
    communicator: Communicator = field(default_factory=Communicator)
    plan: MemoryPlan | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.recipe = self.task.recipe
        all_parameters = list(parameters)
        trained = [parameter for parameter in all_parameters if parameter.requires_grad]
        self._weights = sum(parameter.nbytes for parameter in all_parameters)
        self._sizes = [parameter.nbytes for parameter in trained]
        self._state = self._state_bytes(trained)

    def make(self, state: TrainingState, taken: int) -> None:
        """Makes the plan, or takes over that of a saved state if it was made for the same settings.

        ``taken`` bytes of optimizer state are already allocated.

        Raises:
            InputError: The budget does not suffice for one sentence.
        """
        value = self.recipe.training.memory_budget
        if value is None:
            return
        (outside,) = self.communicator.all_reduce_max(self._outside(str(value)))
        least = self._weights + self._state + outside
        if value != "auto" and parse_size(str(value)) < least:  # reported at once, without an estimate
            raise InputError(
                f"training.memory_budget {size_text(parse_size(str(value)))}: the parameters and the optimizer's "
                f"state alone take {size_text(least - outside)}{beside(outside)}; use a larger budget, such as "
                f"{nearest_budget(2 * least)}, or a smaller model"
            )

        def plan() -> dict[str, Any]:
            if state.plan.get("made_for") == self._made_for(state.text):
                return {"plan": state.plan}
            budget = budget_bytes(value, self.device, self._weights + taken) - outside
            try:
                return {"plan": self._planned(budget, outside).state_dict()}
            except InputError as error:  # raised on all ranks, since further plans may be tried
                return {"error": error.lines}

        found = self.communicator.on_rank_zero(plan)
        if "error" in found:
            raise InputError(*found["error"])
        self.plan = MemoryPlan.from_state_dict(found["plan"])

    def _outside(self, value: str) -> int:
        """Returns how much of a budget in bytes is not for tensors; the free memory that "auto" means is for them."""
        if value == "auto" or self.device.type != "cuda":
            return 0
        graphs = len(self.batches.shapes()) if self.recipe.training.in_graphs else 0
        meter = outside_meter(self.device)
        outside = meter.expected(graphs)
        context, libraries, kernels = map(size_text, outside)
        self.notes.append(
            f"training.memory_budget {value}: {size_text(outside.total)} of it for memory outside of PyTorch's "
            f"allocator (context {context}, libraries {libraries}, kernels and CUDA graphs {kernels}; "
            f"{meter.source})"
        )
        return outside.total

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Limits PyTorch's allocator on a GPU to the budget, so that exceeding it raises an out-of-memory error."""
        if self.device.type != "cuda" or self.plan is None:
            yield
            return
        share = self.plan.budget / limits_of(self.device).memory
        # Unlike PyTorch's other functions, this one does not take "cuda" for the current GPU.
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)

    def store(self, state: TrainingState) -> None:
        """Stores the plan in a state that is about to be saved."""
        state.plan = {}
        if self.plan is not None:
            state.plan = {"made_for": self._made_for(state.text), **self.plan.state_dict()}

    def largest_batches(self) -> list[AnyBatch]:
        """Returns batches whose gradient needs the most memory: one, or two equal ones if gradients are accumulated.

        These are batches of all ranks together.
        """
        if self.plan is None:
            return [self.batches.worst_batch()]
        worst = self.plan.worst
        rows = worst.rows * self.communicator.size
        batch = self.batches.largest_batch(worst.source, worst.target).first(rows)
        return [batch, batch] if worst.parts > 1 and self.device.type == "cuda" else [batch]

    def every_shape(self, updates: int) -> Iterator[AnyBatch]:
        """Yields a batch of random ids of each shape, frequent shapes first, for at most as many updates as follow."""
        shapes = sorted(self.batches.shapes(), key=lambda shape: shape.batches, reverse=True)
        most = self.recipe.training.max_updates
        for shape in shapes[: None if most is None else max(0, most - updates)]:
            yield self.task.example(Shape(shape.rows, shape.source, shape.target))

    def reserve_for_optimizer(self, optimizer: FusedOptimizer) -> torch.Tensor:
        """Allocates as many bytes as the optimizer's state will need on a GPU; nothing if it exists or on a CPU.

        Raises:
            TrainingError: There is not enough memory.
        """
        exists = bool(optimizer.state) or self.device.type != "cuda"
        try:
            return torch.empty(0 if exists else self._state, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise TrainingError(
                f"out of memory on {self.device} for the optimizer's state; use a smaller model or another GPU"
            ) from error

    def shrink(self, batch: AnyBatch, rows: int) -> None:
        """Halves the planned size of micro-batches for batches like this one, after ``rows`` rows ran out of memory."""
        assert self.plan is not None
        smaller = self.plan.halve(self.plan.find(batch), rows)
        self.notes.append(
            f"out of memory on {self.device} for {rows} pairs of {smaller.source} x {smaller.target}; micro-batches "
            f"have at most {smaller.rows} from now on"
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _state_bytes(self, trained: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of the optimizer's state on the rank with the most, without its few counters."""
        optimizer = make_optimizer({}, self.recipe.training.optimizer)
        size = sum(optimizer.moment_bytes(parameter) for parameter in trained)
        if self.recipe.training.averaging.start != "never":
            size += sum(self._sizes)
        if self.communicator.size > 1 and self.recipe.parallel.shard_optimizer:
            size = int(size * largest_share(self._sizes, self.communicator.size)[1])
        return size

    def _made_for(self, text: str) -> str:
        """Returns a fingerprint of everything that a plan depends on; ``text`` is the fingerprint of the text."""
        irrelevant = marked_keys(Recipe, NO_MEMORY)
        parts: dict[str, Any] = {
            "recipe": {key: value for key, value in leaves(self.recipe) if key not in irrelevant},
            "device": self.device.type,
            "memory": total_memory(self.device) if self.recipe.training.memory_budget == "auto" else 0,
            "limits": limits_of(self.device)[:3] if self.device.type == "cuda" else [],
            "precision": self.precision.name,
            "text": text,
            "ranks": self.communicator.size,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _planned(self, budget: int, outside: int) -> MemoryPlan:
        """Returns the plan for a budget of bytes for tensors; the recipe's has those outside of the allocator too."""
        recipe, training = self.recipe, self.recipe.training
        kind, size = self.device.type, self.communicator.size
        ranks = ranks_that_differ(recipe.parallel, size, self._sizes, kind)
        planner = Planner(
            [shape._replace(rows=rows_of_share(shape.rows, size)) for shape in self.batches.shapes()],
            settings(Implementations.of(recipe.ops), kind),
            budget,
            estimator(self.task, kind, self.precision, ranks),
            accumulating=training.update_interval > 1,
            width=training.bucket_width or 1,
            persists=kind == "cuda" and training.in_graphs,
            outside=outside,
        )
        plan = MemoryPlan(budget, planner.allot(), self._decoding_rows(budget, outside))
        if plan.divides and training.memory_budget != "auto":
            plan.whole = planner.budget_of_whole_batches()
        return plan

    def _decoding_rows(self, budget: int, outside: int) -> int:
        """Returns how many sentences validation and final test translate together; 1 if none is translated."""
        if not self.task.translates:
            return 1
        recipe, decoding = self.recipe, self.recipe.decoding
        texts = [each for each in (self.prepared.valid, self.prepared.test) if each is not None]
        translated = texts if recipe.training.decode_and_evaluate else texts[-1:]
        longest = max(int(text.source_lengths.max()) for text in translated)
        # The end of training translates the last text. Batches of longer sentences contain fewer of them.
        source = min(longest, recipe.pairs.max_length) + 1
        target = int(decoding.max_output_factor * longest) + MAX_OUTPUT_EXTRA + 1

        vocabularies = self.prepared.vocabularies
        words, target_words = (side.size for side in vocabularies.sides)

        def needed_bytes(sentences: int) -> int:
            shape = sentences, source, target
            factors = vocabularies.factor_sizes
            stored = self._weights if recipe.training.param_dtype == "bfloat16" else 0  # beside float32
            return (
                stored
                + self._state
                + estimate_search(recipe, words, target_words, shape, self.device.type, factors)
            )

        rows = search_rows(needed_bytes, usable(budget), decoding.batch_size)
        if rows == 0:
            size = needed_bytes(1)
            raise InputError(
                f"training.memory_budget {size_text(budget + outside)}: translating one validation sentence of "
                f"{source} tokens with decoding.beam_size={decoding.beam_size} needs {size_text(size)}"
                f"{beside(outside)}; set training.memory_budget={sufficient_budget(size, outside)} or a smaller beam"
            )
        return rows
