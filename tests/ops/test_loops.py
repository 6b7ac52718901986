"""What the loop of the attentional LSTM asks of a backend in a step, and what it does itself: its products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from econmt_ops import AttentionalLSTMState, AttentionalLSTMWeights, Coverage
from econmt_ops.attentional_lstm import recompute
from econmt_ops.attentional_lstm.backward import Backward
from econmt_ops.attentional_lstm.forward import forward
from econmt_ops.attentional_lstm.problem import AttentionalArguments, AttentionalProblem, Result
from econmt_ops.attentional_lstm.reference import DecoderOptions
from econmt_ops.backends import BACKENDS
from econmt_ops.backends.protocol import (
    AttentionBackward,
    AttentionGradients,
    AttentionInputs,
    CoverageStep,
    Read,
)
from econmt_ops.products.stack import StackOptions
from tests.ops.helpers import Make
from tests.ops.test_recompute import recorded_calls

WAYS = ("forward", "backward")
LAYERS, BATCH, POSITIONS, HIDDEN, SIZE, WIDTH = 3, 2, 4, 5, 6, 7

calls: Counter[str] = Counter()
"""Of the backend, since it was cleared."""


class NoAttention:
    """Counts what is asked of an attention, and does nothing."""

    def __init__(self, keys: Tensor, projected: Tensor, score: Tensor | None) -> None:
        self.keys, self.projected, self.score = keys, projected, score

    def forward(
        self, both: Tensor, outputs: Sequence[Tensor], weights: Tensor, coverage: CoverageStep | None
    ) -> None:
        assert coverage is None
        calls["attention forward"] += 1
        assert both.shape == (BATCH, self.keys.shape[2] + HIDDEN)
        assert [output.shape for output in outputs] == [(BATCH, HIDDEN)] * 2
        assert weights.shape == (BATCH, POSITIONS)

    def weights_of(self, queries: Tensor, coverage: Sequence[Tensor] | None) -> Tensor:
        assert coverage is None
        calls["weights"] += 1
        return queries.new_zeros(*queries.shape[:2], POSITIONS)

    def backward(self, step: AttentionBackward) -> None:
        calls["attention backward"] += 1
        assert all(part.stride(1) == 1 for part in (*step[:4], *step.doutputs, step.dboth))
        assert step.dweights is None
        assert (step.coverage, step.dcoverage, step.dstate) == (None, None, None)
        assert step.dscores.shape == (BATCH, POSITIONS)

    def projected_gradient(self, weights: Tensor, da: Tensor) -> Tensor:
        calls["gradients"] += 1
        assert weights.is_contiguous()
        assert da.is_contiguous()
        return torch.zeros_like(self.projected)

    def gradients(self, queries: Tensor, dscores: Tensor) -> AttentionGradients:
        calls["gradients"] += 1
        assert queries.is_contiguous()
        assert dscores.is_contiguous()
        return AttentionGradients(torch.zeros_like(self.keys), self.score, None)

    def coverage_gradients(self) -> dict[str, Tensor]:
        return {}


class NoSteps:
    """Counts what is asked of a backend, and does nothing."""

    def __init__(self, like: Tensor) -> None:
        assert like.shape[-1] == WIDTH

    def cell_forward(self, gates: Tensor, *states: Any, read: Read | None = None, **options: Any) -> None:
        calls["cell forward"] += 1
        assert options.get("recurrent") is None
        assert gates.shape == (BATCH, 4 * HIDDEN)
        written = [*states[2], *(() if read is None else read.destinations)]
        assert all(part.shape == (BATCH, HIDDEN) and part.stride(1) == 1 for part in written)

    def prepare_gates(self, gates: Tensor) -> Tensor:
        calls["prepare"] += 1
        return gates

    def scan_cells(self, gates: Tensor, first: Tensor) -> Tensor:
        calls["scan"] += 1
        return first.new_zeros(len(gates) + 1, *first.shape)

    def cell_backward(self, *given: Any, keep: Tensor | None = None, scale: float = 1.0) -> None:
        calls["cell backward"] += 1
        assert keep is None or (keep.shape == (BATCH, HIDDEN) and scale == 2.0)
        assert len(given[3]) == 2, "gradients of h"

    def attention(self, inputs: AttentionInputs, coverage: Coverage | None) -> NoAttention:
        assert inputs.norm is None
        assert coverage is None
        return NoAttention(inputs.keys, inputs.projected, inputs.score)


VIEWS = {
    *("alias", "view", "slice", "select", "t", "transpose"),
    *("unsqueeze", "squeeze", "unbind", "expand", "detach"),
}


class Operators(TorchDispatchMode):
    """Counts the operators that do something with memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def arguments(steps: int, stash: str, query: bool, dropout: float = 0.0) -> AttentionalArguments:
    """What the operator is given, with the backend that does nothing."""
    make, size = Make("cpu", torch.float32), SIZE if query else HIDDEN
    weights = AttentionalLSTMWeights(
        make.layers(WIDTH + HIDDEN, HIDDEN, LAYERS),
        make(SIZE, HIDDEN) if query else None,
        make(size),
        make(HIDDEN, HIDDEN + 3),
        make(HIDDEN),
    )
    state = AttentionalLSTMState(make.state(BATCH, HIDDEN, LAYERS), make(BATCH, HIDDEN))
    tensors = make(BATCH, steps, WIDTH), make(BATCH, POSITIONS, size), make(BATCH, POSITIONS, 3)
    options = DecoderOptions(None, StackOptions(dropout=dropout, seed=torch.tensor(0)))
    call = recorded_calls(
        lambda: recompute.attentional_lstm(*tensors, weights, state, options, stash=stash),
        {"econmt_ops::attentional_lstm"},
    )["econmt_ops::attentional_lstm"]
    return AttentionalArguments(*call[: len(AttentionalArguments._fields)])._replace(backend="toy")


def both_passes(
    steps: int, stash: str, query: bool, dropout: float = 0.0
) -> tuple[Counter[str], Counter[str]]:
    """What the backend is asked in the passes of a call of one block, and the operators that the loop runs itself."""
    given = arguments(steps, stash, query, dropout)
    calls.clear()
    with torch.no_grad(), Operators() as operators:
        result = forward(AttentionalProblem(given), True)
        incoming = dict.fromkeys(Result._fields, None) | {"outputs": torch.zeros_like(result.outputs)}
        kept = result if stash != "outputs" else result._replace(attention=None)
        Backward(AttentionalProblem(given), kept, incoming).run()
    return Counter(calls), operators.counts


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("stash", ["outputs", "attention", "cells", "gates"])
def test_a_step_is_a_product_and_a_cell_each_layer_and_an_attention(
    stash: str, query: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "toy", f"{__name__}:NoSteps")
    few, more = both_passes(5, stash, query, dropout), both_passes(6, stash, query, dropout)
    wanted = {f"{what} {way}": count for way in WAYS for what, count in (("cell", LAYERS), ("attention", 1))}
    assert more[0] - few[0] == wanted
    # One more product for the query and the stack's share of o, and one back; without a query the gradient of the
    # stack's output comes from two sides, which are added by the product.
    assert sum((more[1] - few[1]).values()) == 2 * (LAYERS + 1)
    assert set(more[1] - few[1]) <= {"mm", "addmm", "addmm_"}
    assert not few[1] - more[1]


@pytest.mark.parametrize("stash", ["outputs", "attention", "cells", "gates"])
def test_what_a_block_makes_again(stash: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "toy", f"{__name__}:NoSteps")
    asked, _ = both_passes(5, stash, True)
    assert asked["gradients"] == 2
    assert asked["weights"] == (stash == "outputs")
    assert asked["scan"] == (LAYERS if stash in ("outputs", "attention") else 0)
    assert asked["prepare"] == (0 if stash == "gates" else LAYERS)
