"""The loops' backends agree: what the eager one computes, in float32 and on the same operands, ours computes too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.eager import EagerSteps
from econmt_ops.backends.protocol import (
    AttentionBackward,
    AttentionGradients,
    AttentionInputs,
    AttentionKernels,
    Read,
)
from econmt_ops.backends.triton.steps import TritonSteps


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kept", [False, True])
def test_a_block_of_cells(kept: bool, device: str) -> None:
    torch.manual_seed(0)
    steps, rows, hidden = 3, 2, 5
    sums = torch.randn(steps, rows, 4 * hidden, device=device)
    recurrent = torch.randn(rows, 4 * hidden, device=device)
    first, dlast = torch.randn(2, rows, hidden, device=device)
    dh = torch.randn(2, steps, rows, hidden, device=device)
    keep = torch.rand(rows, hidden, device=device) < 0.5

    def run(kernels: EagerSteps) -> list[Tensor]:
        gates, c = sums.clone(), first.clone()
        h, other = torch.empty(2, steps, rows, hidden, device=device)
        read = torch.empty(2, steps, rows, hidden, device=device)
        for step in range(steps):
            given = Read([read[0, step], read[1, step]], h[step - 1] if step else None, keep, 2.0)
            places = [h[step], other[step]]
            kernels.cell_forward(gates[step], c, c, places, keep=kept, recurrent=recurrent, read=given)
        if not kept:
            gates = kernels.prepare_gates(sums + recurrent)
        cells = kernels.scan_cells(gates, first)
        dc, dgates = dlast.clone(), torch.empty_like(sums)
        for step in reversed(range(steps)):
            kernels.cell_backward(
                gates[step],
                cells[step],
                cells[step + 1],
                [dh[0, step], dh[1, step]],
                dc,
                dgates[step],
                keep=keep if step else None,
                scale=2.0,
            )
        return [h, other, read, c, cells, dc, dgates]

    like = sums.new_empty(0)
    for found, expected in zip(run(TritonSteps(like)), run(EagerSteps(like)), strict=True):
        close(found, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["additive", "norm", "dot"])
def test_steps_of_attention(kind: str, device: str) -> None:
    torch.manual_seed(0)
    steps, batch, positions, size, hidden = 3, 3, 7, 6, 9

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    lengths = torch.tensor([7, 0, 3], device=device)
    padding = torch.arange(positions, device=device) >= lengths[:, None]
    keys, projected = (
        draw(batch, positions, width).masked_fill(padding[..., None], 0.0) for width in (size, hidden)
    )
    score = None if kind == "dot" else draw(size)
    norm = (draw(size), draw(size)) if kind == "norm" else None
    both = draw(steps, batch, size + hidden)
    doutputs, dweights = draw(2, batch, hidden), draw(batch, positions)

    def run(attention: AttentionKernels) -> tuple[list[Tensor], AttentionGradients]:
        outputs = torch.empty(3, steps, batch, hidden, device=device)
        weights = torch.empty(steps, batch, positions, device=device)
        for step in range(steps):
            attention.forward(both[step], outputs[:, step].unbind(0), weights[step])
        queries = both[..., :size].contiguous()
        again = attention.weights_of(queries)
        dboth, dscores = torch.empty_like(both), torch.empty_like(weights)
        contexts = torch.bmm(weights.transpose(0, 1), projected).transpose(0, 1)
        for step in range(steps):
            back = AttentionBackward(
                queries[step],
                contexts[step],
                weights[step],
                outputs[0, step],
                doutputs.unbind(0) if step else doutputs[:1],
                dweights if step else None,
                dboth[step],
                dscores[step],
            )
            attention.backward(back)
        dprojected = attention.projected_gradient(weights, dboth[..., size:])
        return [outputs, weights, again, dboth, dscores, dprojected], attention.gradients(queries, dscores)

    inputs = AttentionInputs(keys, projected, score, norm, 0.7, lengths)
    found, of_ours = run(TritonSteps(keys).attention(inputs))
    expected, wanted = run(EagerSteps(keys).attention(inputs))
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    for one, other in zip(of_ours[:2], wanted[:2], strict=True):
        close(one, other)
    assert (of_ours.norm is None) == (wanted.norm is None)
    for one, other in zip(of_ours.norm or (), wanted.norm or (), strict=True):
        close(one, other)
