"""The persistent LSTM at the sizes of real layers, in the types that a GPU multiplies in, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from econmt_ops import LSTMWeights
from econmt_ops.lstm import reference, triton
from econmt_ops.products.stack import StackOptions
from tests.ops.simulated_gpu import simulated_gpu

CASES = [
    "3x4x7x5", "17x9x24x24 lengths", "17x9x24x24 lengths reverse state", "1x1x8x33", "33x7x64x100 reverse layers",
    "40x6x64x200 state outputs lengths", "64x12x128x512 cells", "100x12x128x512 lengths layers", "64x5x64x768",
    "64x8x64x1024 lengths", "128x8x64x1024", "250x6x64x1024 lengths", "300x5x64x960 state",
    "300x5x64x512 lengths reverse", "64x9x64x512 both lengths",
    "20x9x64x48 both lengths", "64x8x64x512 float16", "64x8x64x512 float32", "17x8x64x100 float32 lengths reverse",
    "64x9x64x256 float32 both lengths",
]  # fmt: skip
"""Batch, steps, input size and hidden size, and options: a stash, a type, "layers" (two) or "both" (directions)."""


def weights(hidden: int, size: int) -> LSTMWeights:
    scale = hidden**-0.5
    shapes = ((size,), size**-0.5), ((hidden,), scale), ((), scale)
    made = (torch.randn(4 * hidden, *shape) * factor for shape, factor in shapes)
    return LSTMWeights(*(part.cuda().requires_grad_() for part in made))


@pytest.fixture
def _tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    yield
    matmul.allow_tf32 = before


LIMITED = [
    "17x9x24x24 lengths reverse state", "33x7x64x100 reverse layers", "40x6x64x200 state outputs lengths",
    "64x8x128x256", "64x9x64x256 both lengths", "64x9x64x256 float32 both lengths", "64x12x128x512 cells",
    "64x12x128x512 lengths layers", "64x8x64x512 float16", "32x6x64x640", "64x8x64x1024 lengths",
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.usefixtures("_tf32")
@pytest.mark.parametrize("case", CASES)
def test_outputs_states_and_all_gradients_are_within_the_rounding_of_the_type(case: str) -> None:
    check(case)


@pytest.mark.cuda
@pytest.mark.usefixtures("_tf32")
@pytest.mark.parametrize("case", LIMITED)
@pytest.mark.parametrize("multiprocessors", [24, 34, 82])
def test_launches_keep_to_the_multiprocessors_of_a_small_gpu(
    multiprocessors: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are right, and larger layers run step by step."""
    from econmt_ops.backends.triton.launching import Launch

    programs: list[int] = []
    launch = Launch.__call__

    def watched(self: Launch, count: int, *arguments: Any) -> None:
        if self._constants.get("launch_cooperative_grid"):
            programs.append(count)
        launch(self, count, *arguments)

    monkeypatch.setattr(Launch, "__call__", watched)
    with simulated_gpu(capability=(8, 6), multiprocessors=multiprocessors):
        check(case)
    hidden = int(case.split()[0].split("x")[3])
    if "float32" not in case:  # in TF32 single steps may be faster
        assert bool(programs) == (hidden <= {24: 256, 34: 512, 82: 640}[multiprocessors])
    assert all(0 < count <= multiprocessors for count in programs)


def check(case: str) -> None:
    """Compares a case with float64."""
    torch.manual_seed(1)
    sizes, *flags = case.split()
    batch, steps, size, hidden = map(int, sizes.split("x"))
    dtype = next((getattr(torch, flag) for flag in flags if flag.startswith("float")), torch.bfloat16)
    stash = next((flag for flag in flags if flag in ("outputs", "cells")), "gates")
    both, has_state = "both" in flags, "state" in flags
    count = 2 if both or "layers" in flags else 1
    stack = tuple(weights(hidden, hidden if number and not both else size) for number in range(count))
    inputs = torch.randn(batch, steps, size, device="cuda").to(dtype).requires_grad_()
    lengths = None
    if "lengths" in flags:
        lengths = torch.randint(0, steps + 1, (batch,), generator=torch.Generator().manual_seed(2))
        lengths[0] = steps
    make = torch.randn if has_state else torch.zeros
    state = tuple(
        tuple(
            make(batch, hidden, device="cuda").to(kind).requires_grad_(has_state)
            for kind in (dtype, torch.float32)
        )
        for _ in stack
    )
    options = StackOptions(lengths, "reverse" in flags, from_zero=not has_state, both_ways=both)
    exact = tree_map(lambda part: part.detach().double().requires_grad_(), (inputs, stack, state))
    got = triton.lstm(inputs, stack, state, options, stash=stash)
    want = reference.lstm(*exact, options)
    results, rights = tree_leaves(got), tree_leaves(want)
    seeds = [torch.randn_like(part) for part in rights]
    given = [seed.to(part.dtype) for seed, part in zip(seeds, results, strict=True)]
    results += torch.autograd.grad(
        results, tree_leaves([inputs, stack, *([state] if has_state else [])]), given
    )
    rights += torch.autograd.grad(rights, tree_leaves([*exact[:2], *(exact[2:] if has_state else [])]), seeds)
    for number, (value, right) in enumerate(zip(results, rights, strict=True)):
        error = float((value.detach().double() - right.detach()).norm() / (right.detach().norm() + 1e-12))
        assert error < (3e-2 if dtype == torch.bfloat16 else 5e-3), (number, error)
