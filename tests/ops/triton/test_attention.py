from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends.protocol import AttentionBackward, AttentionInputs
from econmt_ops.backends.triton.attention import Choice, TritonAttention
from tests.ops.helpers import assert_close
from tests.ops.triton.test_cells import empty as poisoned
from tests.ops.triton.test_cells import random as rows

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# batch, positions, attention size, width of the values
TYPED_SIZES = [
    ((1, 1, 5, 17), torch.float32),
    ((3, 3, 33, 12), torch.float32),
    ((2, 130, 12, 33), torch.float32),
    ((3, 40, 64, 16), torch.bfloat16),
    ((2, 20, 16, 16), torch.float16),
]
if torch.cuda.is_available():  # the sizes of a real model, which the interpreter would take minutes for
    TYPED_SIZES += [((3, 100, 512, 512), dtype) for dtype in (torch.float32, torch.bfloat16)]
KINDS = ["additive", "norm", "dot"]


class Case:
    """An attention with its operands, and the same in float64."""

    def __init__(
        self,
        kind: str,
        size: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: str,
        lengths: bool = True,
    ) -> None:
        torch.manual_seed(sum(size))
        batch, positions, attention, hidden = self.size = size
        self.dtype, self.device = dtype, device

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)

        self.keys, self.values = draw(batch, positions, attention), draw(batch, positions, hidden)
        self.lengths = None
        self.padding = torch.zeros(batch, positions, dtype=torch.bool, device=device)
        if lengths:
            self.lengths = torch.tensor([positions, 0, positions // 2][:batch], device=device)
            self.padding = torch.arange(positions, device=device) >= self.lengths[:, None]
            for tensor in self.keys, self.values:
                tensor[self.padding] = 0.0
        self.score = None if kind == "dot" else draw(attention, dtype=torch.float32)
        self.norm = (draw(attention), draw(attention)) if kind == "norm" else None
        self.scale = 0.7
        inputs = self.keys, self.values, self.score, self.norm, self.scale, self.lengths
        self.inputs = AttentionInputs(*inputs)
        self.kernels = TritonAttention(self.inputs)
        exact = [self.keys, self.values, self.score, *(self.norm or ())]
        self.leaves = [leaf.double().requires_grad_() for leaf in exact if leaf is not None]

    def reference(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (T, B, S) and contexts (T, B, H) of queries (T, B, A)."""
        keys, values, *rest = self.leaves
        if self.score is None:
            scores = self.scale * torch.einsum("tba,bsa->tbs", query, keys)
        else:
            hidden = query.unsqueeze(2) + keys
            if self.norm is not None:
                hidden = functional.layer_norm(hidden, hidden.shape[3:], rest[1], rest[2], 1e-5)
            scores = torch.tanh(hidden) @ rest[0]
        weights = scores.masked_fill(self.padding, -1e9).softmax(2).masked_fill(self.padding, 0.0)
        return weights, torch.einsum("tbs,bsh->tbh", weights, values)

    def close(self, found: Tensor, expected: Tensor, name: str) -> None:
        assert_close([found], [expected], TOLERANCE[self.dtype], name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "dtype"), TYPED_SIZES)
def test_a_step_and_its_gradients(
    kind: str, size: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    case = Case(kind, size, dtype, device, lengths=size[0] > 1)
    batch, positions, attention, hidden = size
    both = rows(batch, attention + hidden, dtype=dtype, device=device)
    query, share = both[:, :attention], both[:, attention:]
    exact_query, exact_share = (part.double().unsqueeze(0).requires_grad_() for part in (query, share))
    exact_weights, exact_context = case.reference(exact_query)
    exact_output = torch.tanh(exact_share + exact_context)

    weights = poisoned(batch, positions, dtype=dtype, device=device)
    outputs = [poisoned(batch, hidden, dtype=dtype, device=device) for _ in range(2)]
    case.kernels.attend(query, share, weights, outputs)
    case.close(weights, exact_weights[0], "weights")
    case.close(outputs[0], exact_output[0], "output")
    assert torch.equal(*outputs)
    again = poisoned(batch, positions, dtype=dtype, device=device)
    case.kernels.attend(query, None, again)
    torch.testing.assert_close(again, weights)  # compiled apart, so that sums may be rounded otherwise

    doutputs = [rows(batch, hidden, dtype=dtype, device=device) for _ in range(2)]
    dweights = rows(batch, positions, dtype=torch.float32, device=device)
    context = exact_context[0].detach().to(dtype)
    for given in None, dweights:
        lost = (exact_output[0] * (doutputs[0].double() + doutputs[1].double())).sum()
        if given is not None:
            lost = lost + (exact_weights[0] * given.double()).sum()
        dquery, dshare, *dleaves = torch.autograd.grad(
            lost, [exact_query, exact_share, *case.leaves], retain_graph=True
        )
        dboth = poisoned(batch, attention + hidden, dtype=dtype, device=device)
        dscores = poisoned(batch, positions, dtype=torch.float32, device=device)
        step = AttentionBackward(query, context, weights, outputs[0], doutputs, given, dboth, dscores)
        case.kernels.backward(step)
        case.close(dboth[:, :attention], dquery[0], "query")
        case.close(dboth[:, attention:], dshare[0], "share")
        assert not dscores[case.padding].any()
    if case.score is not None:
        check_sums(case, query, dscores, [dleaves[0], *dleaves[2:]])


def check_sums(case: Case, query: Tensor, dscores: Tensor, expected: list[Tensor]) -> None:
    sums = case.kernels.key_gradients(query, dscores)
    names = ("keys", "score", "gain", "bias")[: len(expected)]
    for found, wanted, name in zip(sums, expected, names, strict=True):
        case.close(found, wanted, name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "batch_first"), [("additive", True), ("additive", False), ("norm", False), ("dot", False)]
)
def test_all_queries_at_once(kind: str, batch_first: bool, device: str) -> None:
    batch, positions, attention, hidden = 2, 19, 20, 9
    case = Case(kind, (batch, positions, attention, hidden), torch.float32, device)
    steps = 3
    shape = (batch, steps) if batch_first else (steps, batch)
    group = steps if batch_first else 1

    def of_steps(tensor: Tensor) -> Tensor:
        """As (T, B, .)."""
        tensor = tensor.unflatten(0, shape)
        return tensor.transpose(0, 1) if batch_first else tensor

    count = batch * steps
    query = rows(count, attention, dtype=torch.float32, device=device)
    dcontext = torch.randn(count, hidden).to(device)
    exact = of_steps(query.double()).requires_grad_()
    exact_weights, exact_context = case.reference(exact)
    weights, context = torch.empty(count, positions, device=device), torch.empty(count, hidden, device=device)
    case.kernels.attend(query, None, weights, [context], group)
    case.close(of_steps(weights), exact_weights, "weights")
    case.close(of_steps(context), exact_context, "context")
    if batch_first:  # as a search has its queries, which needs no gradients
        return
    dweights = torch.randn(count, positions, device=device)
    by_context = (exact_context * of_steps(dcontext).double()).sum()
    by_weights = (exact_weights * of_steps(dweights).double()).sum()
    for doutputs, given, lost in (([dcontext], None, by_context), ([], dweights, by_weights)):
        dquery, *dleaves = torch.autograd.grad(
            lost, [exact, *case.leaves], retain_graph=True, allow_unused=True
        )
        made, dscores = torch.empty_like(query), torch.empty_like(weights)
        step = AttentionBackward(query, context, weights, context, doutputs, given, made, dscores)
        TritonAttention(case.inputs._replace(squashes=False)).backward(step)
        case.close(of_steps(made), dquery, "query")
        if case.score is not None:
            check_sums(case, query, dscores, [dleaves[0], *dleaves[2:]])


@pytest.mark.parametrize("kind", ["additive", "dot"])
@pytest.mark.parametrize("factor", [-300.0, 300.0])
def test_scores_of_any_size_leave_a_softmax(kind: str, factor: float, device: str) -> None:
    """Sums of |score| far above what exp can take; scores all far below zero."""
    batch, positions, attention = 2, 40, 8
    case = Case(kind, (batch, positions, attention, attention), torch.float32, device)
    case.kernels.score = None if case.score is None else torch.full_like(case.score, factor)
    query = torch.full((batch, attention), 2.0, device=device)
    if kind == "dot":
        case.keys.fill_(factor)
        case.keys[case.padding] = 0.0
    weights = torch.empty(batch, positions, device=device)
    case.kernels.attend(query, None, weights)
    assert weights[0].sum().item() == pytest.approx(1.0, abs=1e-5)
    assert not weights[case.padding].any()


def test_where_tf32_is_allowed_keys_and_values_have_as_many_digits(device: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        case = Case("additive", (2, 20, 16, 8), torch.float32, device)
        huge = TritonAttention(case.inputs._replace(keys=case.keys * 1e6, projected=case.values * 1e6))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert case.kernels.keys.dtype == case.kernels.values.dtype == torch.float16
    query = torch.randn(2, 16, device=device)
    weights, context = (torch.empty(2, columns, device=device) for columns in (20, 8))
    case.kernels.attend(query, None, weights, [context])
    exact_weights, exact_context = case.reference(query.double().unsqueeze(0))
    assert (weights - exact_weights[0]).abs().max() < 1e-3
    assert (context - exact_context[0]).abs().max() < 3e-3
    huge.attend(query, None, weights, [context])
    assert context.isfinite().all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_repetitions_are_equal_bit_for_bit(kind: str, device: str) -> None:
    case = Case(kind, (2, 18, 12, 8), torch.float32, device)
    query, weights = torch.randn(2, 12, device=device), torch.empty(2, 18, device=device)
    found = []
    for _ in range(2):
        context = torch.empty(2, 8, device=device)
        dquery, dscores = torch.empty_like(query), torch.empty_like(weights)
        case.kernels.attend(query, None, weights, [context])
        step = AttentionBackward(query, context, weights, context, [context], None, dquery, dscores)
        TritonAttention(case.inputs._replace(squashes=False)).backward(step)
        found.append([weights.clone(), context, dquery, dscores])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "choice", [Choice(16), Choice(16, 2), Choice(8, 2), Choice(4), Choice(8, gluon=False)], ids=str
)
def test_every_division_of_a_step_gives_the_same(choice: Choice) -> None:
    case = Case("additive", (3, 100, 512, 512), torch.bfloat16, "cuda")
    batch, positions, attention, hidden = case.size
    both = rows(batch, attention + hidden, dtype=torch.bfloat16, device="cuda")
    query, share = both[:, :attention].contiguous(), both[:, attention:].contiguous()
    weights, context = case.reference(query.double().unsqueeze(0))
    kernels = TritonAttention(case.inputs, choice)
    found = poisoned(batch, positions, dtype=torch.bfloat16, device="cuda")
    output = poisoned(batch, hidden, dtype=torch.bfloat16, device="cuda")
    kernels.attend(query, share, found, [output])
    case.close(found, weights[0], "weights")
    case.close(output, torch.tanh(share.double() + context[0]), "output")


@pytest.mark.parametrize("factor", [1e-30, 1e-5, 1e5, 1e30, 3e37])
def test_keys_and_values_of_any_size_with_tf32(
    factor: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept in 16 bits, in units of each sentence, of which one is a million times as large."""
    monkeypatch.setattr("econmt_ops.backends.triton.attention.matmul_tf32", lambda: True)
    batch, positions, size, width = 2, 7, 12, 9
    torch.manual_seed(3)
    units = torch.tensor([factor, factor * 1e-6]).to(device)[:, None, None]
    keys = torch.randn(batch, positions, size).to(device).clamp(-3, 3) * units
    values = torch.randn(batch, positions, width).to(device).clamp(-3, 3) * units
    query = torch.randn(batch, size).to(device) / units.squeeze(2)
    kernels = TritonAttention(AttentionInputs(keys, values, None, scale=0.5))
    assert kernels.fast
    weights, context = torch.empty(batch, positions, device=device), torch.empty(batch, width, device=device)
    kernels.attend(query, None, weights, [context])
    scores = 0.5 * torch.einsum("ba,bsa->bs", query.double(), keys.double())
    exact = scores.softmax(1)
    torch.testing.assert_close(weights.double(), exact, rtol=5e-3, atol=1e-4)
    wanted = torch.einsum("bs,bsh->bh", exact, values.double()) / units.squeeze(2)
    torch.testing.assert_close(context.double() / units.squeeze(2), wanted, rtol=5e-3, atol=5e-3)
