"""States that begin anew inside persistent kernels: the segments of a row are independent, in both directions."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import econmt_ops
from econmt_ops.dispatch.rule import rules_only
from econmt_ops.lstm import persistent_layer, triton
from econmt_ops.modules import base
from tests.ops.test_rnn import BATCH, HIDDEN, RAGGED, SIZE, STEPS, by_segments

PRECISIONS = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 2e-3}
"""Largest relative error on a GPU; float32 is TF32."""


@pytest.fixture(autouse=True)
def _in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows get no empty steps."""
    monkeypatch.setattr(base, "Segments", None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    persistent_layer._PLANS.clear()


def difference(actual: Tensor, expected: Tensor) -> float:
    expected = expected.detach().cpu()
    return float((actual.detach().cpu().double() - expected).norm() / (expected.norm() + 1e-3))


def gradients(run: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Returns outputs, last states and the gradients of all leaves for the same gradient of each result."""
    outputs, last = run()
    results = [outputs, *last]
    draw = torch.Generator().manual_seed(3)
    seeds = [torch.randn(part.shape, generator=draw, dtype=torch.float64) for part in results]
    given = [seed.to(part.device, part.dtype) for seed, part in zip(seeds, results, strict=True)]
    return [*results, *torch.autograd.grad(results, leaves, given)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "bidirectional"])
@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("starts", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_segments_are_independent(
    bidirectional: bool,
    ragged: bool,
    starts: bool,
    recomputed: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "TRAITS", replace(triton.TRAITS, devices=frozenset({device})))
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_layers": 2, "batch_first": True, "bidirectional": bidirectional}
    ours = econmt_ops.LSTM(
        SIZE, HIDDEN, device=device, implementation="auto" if recomputed else "triton", **options
    )
    theirs = nn.LSTM(SIZE, HIDDEN, **options)
    theirs.load_state_dict({name: part.cpu() for name, part in ours.state_dict().items()})
    theirs.double()
    lengths = RAGGED if ragged else None
    resets = torch.rand(BATCH, STEPS, generator=torch.Generator().manual_seed(2)) < 0.35
    resets[0, 0] = resets[1, 3] = resets[1, 5] = resets[3, 0] = True
    inputs = torch.randn(BATCH, STEPS, SIZE, device=device, requires_grad=True)
    shape = len(theirs.all_weights), BATCH, HIDDEN
    state = [torch.randn(shape, device=device, requires_grad=True) for _ in range(2 if starts else 0)]
    leaves = [inputs, *state]
    exact = [part.detach().cpu().double().requires_grad_() for part in leaves]
    expected = gradients(
        lambda: by_segments(theirs, exact[0], tuple(exact[1:]) or None, lengths, resets),
        [*exact, *theirs.parameters()],
    )
    marks = resets if ragged else resets.to(device)
    with rules_only() if recomputed else nullcontext():
        actual = gradients(
            lambda: ours(inputs, tuple(state) or None, lengths=lengths, resets=marks),
            [*leaves, *ours.parameters()],
        )
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert difference(one, other) < (5e-3 if device == "cuda" else 2e-5), number


def test_a_plan_with_resets_serves_no_call_without(device: str) -> None:
    torch.manual_seed(0)
    module = econmt_ops.LSTM(SIZE, HIDDEN, batch_first=True, implementation="triton", device=device)
    inputs = torch.randn(BATCH, STEPS, SIZE, device=device)
    resets = torch.zeros(BATCH, STEPS, dtype=torch.bool, device=device)
    resets[:, 3] = True
    for _ in range(2):
        cut, plain = module(inputs, resets=resets)[0], module(inputs)[0]
        assert torch.equal(module(inputs, resets=torch.zeros_like(resets))[0], plain)
        assert torch.equal(cut[:, :3], plain[:, :3])
        torch.testing.assert_close(cut[:, 3:], module(inputs[:, 3:])[0])
        assert difference(cut[:, 3:], plain[:, 3:].double()) > 0.05


@pytest.mark.cuda
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "case",
    ["128x12x512", "17x9x100 both lengths", "64x8x1024 lengths", "256x6x1024", "1x5x33 both", "300x5x512"],
)
def test_sizes_of_real_layers(case: str, precision: str) -> None:
    """With groups of rows and teams, against the layers of torch.nn in float64."""
    sizes, *flags = case.split()
    batch, steps, hidden = map(int, sizes.split("x"))
    torch.manual_seed(1)
    options: dict[str, Any] = {"batch_first": True, "bidirectional": "both" in flags, "device": "cuda"}
    ours = econmt_ops.LSTM(64, hidden, implementation="triton", **options)
    theirs = econmt_ops.LSTM(64, hidden, implementation="reference", **options).double()
    theirs.load_state_dict(ours.state_dict())
    lengths = torch.randint(0, steps + 1, (batch,)) if "lengths" in flags else None
    resets = torch.rand(batch, steps) < 0.2
    inputs = torch.randn(batch, steps, 64, device="cuda", requires_grad=True)
    exact = inputs.detach().double().requires_grad_()

    def run() -> Any:
        lowered = precision != "float32"
        with torch.autocast(
            "cuda", getattr(torch, precision) if lowered else torch.bfloat16, enabled=lowered
        ):
            return ours(inputs, lengths=lengths, resets=resets.cuda())

    actual = gradients(run, [inputs, *ours.parameters()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "Segments", econmt_ops.modules.resets.Segments)
        expected = gradients(
            lambda: theirs(exact, lengths=lengths, resets=resets), [exact, *theirs.parameters()]
        )
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert difference(one, other) < PRECISIONS[precision], number


@pytest.mark.cuda
def test_the_host_does_not_wait() -> None:
    module = econmt_ops.LSTM(64, 64, batch_first=True, implementation="triton", device="cuda")
    inputs = torch.randn(8, 6, 64, device="cuda", requires_grad=True)
    resets = torch.rand(8, 6, device="cuda") < 0.2
    module(inputs, resets=resets)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(inputs, resets=resets)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
