"""Savings that change results beyond rounding, which a memory budget may choose if the recipe allows it.

They are tried in the order of their cost: moments of the optimizer in 8 bits, then also parameters in bfloat16. A plan
that is exact up to rounding is preferred if it computes every batch whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from econmt.budget.planner import MemoryPlan
from econmt.budget.run_budget import first_plan
from econmt.checkpoint.state import Saving
from econmt.config.recipe import Recipe
from econmt.data.batching.store import PreparedData
from econmt.engine.communicator import Communicator
from econmt.engine.precision import Precision
from econmt.errors import InputError
from econmt.training.context import RunContext

_IN_8_BITS = {"adam": "adam8bit", "adamw": "adamw8bit"}

_TOLD: dict[Saving, str] = {"moments": "moments in 8 bits", "parameters": "parameters in bfloat16"}


def with_savings(recipe: Recipe, savings: Sequence[Saving]) -> Recipe:
    """Returns the recipe with the keys that savings change."""
    training = recipe.training
    changes: dict[str, object] = {}
    if "moments" in savings:
        name = _IN_8_BITS.get(training.optimizer.name, training.optimizer.name)
        changes["optimizer"] = training.optimizer.model_copy(update={"name": name})
    if "parameters" in savings:
        changes["param_dtype"] = "bfloat16"
    if not changes:
        return recipe
    return recipe.model_copy(update={"training": training.model_copy(update=changes)})


def _possible(recipe: Recipe, precision: Precision, processes: int) -> Iterator[list[Saving]]:
    """Yields combinations of savings, cheapest first; the first one is none."""
    training = recipe.training
    savings: list[Saving] = []
    yield savings
    if training.memory_savings == "exact":
        return
    if training.optimizer.name in _IN_8_BITS:
        savings = [*savings, "moments"]
        yield savings
    narrows = training.param_dtype == "float32" and training.averaging.start == "never"
    if narrows and precision.dtype == torch.bfloat16 and processes == 1:
        yield [*savings, "parameters"]


def choose_savings(
    recipe: Recipe,
    precision: Precision,
    processes: int,
    plan_of: Callable[[Recipe], MemoryPlan | None],
) -> tuple[list[Saving], MemoryPlan | None]:
    """Returns the cheapest savings with which batches are computed whole, or those with the fewest parts; and the plan.

    Args:
        plan_of: Plans a recipe; raises InputError if its budget does not suffice for one sentence.

    Raises:
        InputError: The budget does not suffice with any savings.
    """
    found: list[tuple[int, list[Saving], MemoryPlan | None]] = []
    errors: list[InputError] = []
    for savings in _possible(recipe, precision, processes):
        try:
            plan = plan_of(with_savings(recipe, savings))
        except InputError as error:
            errors.append(error)
            continue
        parts = 1 if plan is None else max(entry.parts for entry in plan if entry.batches)
        if parts == 1:
            return savings, plan
        found.append((parts, savings, plan))
    if not found:
        raise errors[-1]
    _, savings, plan = min(found, key=lambda each: each[0])
    return savings, plan


def plan_with_savings(
    recipe: Recipe,
    prepared: PreparedData,
    device: torch.device,
    precision: Precision,
    communicator: Communicator | None = None,
) -> tuple[list[Saving], MemoryPlan | None]:
    """Returns the savings and the plan that a new run would begin with; see :func:`choose_savings`."""
    return choose_savings(
        recipe,
        precision,
        1 if communicator is None else communicator.size,
        lambda changed: first_plan(changed, prepared, device, precision, communicator),
    )


def savings_of_run(context: RunContext) -> list[Saving]:
    """Returns the savings of a run: those that it began with, or those of its first plan."""
    recipe = context.recipe
    if context.saved is not None:
        return context.saved.savings
    if recipe.training.memory_savings == "exact":
        return []
    savings, _ = plan_with_savings(
        recipe, context.prepared, context.device, context.precision, context.communicator
    )
    return savings


def describe_savings(savings: Sequence[Saving]) -> str:
    """Returns a line that tells which savings a run uses; empty without any."""
    told = " and ".join(_TOLD[saving] for saving in savings)
    return f"training.memory_savings lossy: {told}, for the memory budget" if told else ""
