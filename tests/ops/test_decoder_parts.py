"""Decoders of every cell, output and coverage against a naive definition, row by row and position by position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import econmt_ops
from econmt_ops import AttentionalLSTMState, AttentionalLSTMWeights, Coverage, GRUWeights, LSTMWeights
from econmt_ops.core.weights import LayerNormLSTMWeights, tensors_of
from tests.ops.decoder_parts import PARTS, Case, arguments, lengths_of, options
from tests.ops.helpers import Make, assert_close, assert_same_function, each_implementation, to

SIZES = SimpleNamespace(B=3, T=4, S=5, I=6, H=8, A=7, E=4)
ODD = SimpleNamespace(B=1, T=1, S=1, I=3, H=1, A=1, E=1)


def standard(x: Tensor) -> Tensor:
    """Layer normalisation without gain and bias."""
    return (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)


def step(weights: Any, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One step of a layer of one row: x (I,), states (H,) each."""
    h = states[0]
    if isinstance(weights, GRUWeights):
        cell = nn.GRUCell(len(x), len(h)).double()
        named = dict(zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), weights, strict=True))
        return (torch.func.functional_call(cell, named, (x, h)),)
    size, c = len(h), states[1]
    if isinstance(weights, LSTMWeights):
        sums = weights.input @ x + weights.hidden @ h + weights.bias
    elif isinstance(weights, LayerNormLSTMWeights):
        sums = (
            standard(weights.input @ x) * weights.input_gain
            + standard(weights.hidden @ h) * weights.hidden_gain
        )
        sums = sums + weights.bias
    else:
        sums = weights.input @ x + weights.hidden @ h + weights.bias
        sums = torch.cat([standard(sums[k * size : (k + 1) * size]) for k in range(4)])
        sums = sums * weights.gain + weights.shift
    i, f, g, o = (sums[k * size : (k + 1) * size] for k in range(4))
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    shown = c if isinstance(weights, LSTMWeights) else standard(c) * weights.cell_gain + weights.cell_bias
    return o.sigmoid() * shown.tanh(), c


def covered(coverage: Coverage, before: Tensor, share: Tensor, attention: Tensor, h: Tensor) -> Tensor:
    """The coverage (W,) of one position after a step."""
    if coverage.kind == "sum":
        return before + share * attention
    read = share + coverage.attention * attention + coverage.state @ h
    recurrent = coverage.recurrent @ before
    if coverage.kind == "gru":
        size = len(before)
        (ru, zu, nu), (rv, zv, nv) = read.split(size), recurrent.split(size)
        z = (zu + zv).sigmoid()
        return (1 - z) * (nu + (ru + rv).sigmoid() * nv).tanh() + z * before
    name = "softplus" if coverage.kind == "softrelu" else coverage.kind
    return getattr(functional, name)(read + recurrent)


def naive(case: Case, lengths: Tensor | None, masks: Any = None, **given: Any) -> Any:
    """The decoder without dropout, over the positions that a sentence has."""
    inputs, weights, first = given["inputs"], given["weights"], given["state"]
    outputs, attentions, states, lasts, coverages = [], [], [], [], []
    for row in range(len(inputs)):
        length = given["keys"].shape[1] if lengths is None else int(lengths[row])
        keys, values = given["keys"][row, :length], given["values"][row, :length]
        layers = [tuple(part[row] for part in parts) for parts in first.layers]
        o = first.output[row]
        coverage = None if weights.coverage is None else list(first.coverage[row].unbind(0))
        outputs.append([])
        attentions.append([])
        for position in range(inputs.shape[1]):
            x = torch.cat([inputs[row, position], o]) if case.feeds else inputs[row, position]
            for number, layer in enumerate(weights.layers):
                layers[number] = step(layer, x, layers[number])
                x = layers[number][0] + x if case.residual and number else layers[number][0]
            query = x if weights.query is None else weights.query @ x
            scores = []
            for s in range(length):
                if weights.score is None:
                    scores.append(0.7 * (query @ keys[s]))
                    continue
                u = query + keys[s]
                if coverage is not None:
                    u = u + weights.coverage.key @ coverage[s]
                if given["layer_norm"] is not None:
                    u = standard(u) * given["layer_norm"][0] + given["layer_norm"][1]
                scores.append(weights.score @ u.tanh())
            alpha = torch.softmax(torch.stack(scores), 0) if length else keys.new_zeros(0)
            context = alpha @ values
            if coverage is not None:
                for s in range(length):
                    share = weights.coverage.shares[row, s]
                    coverage[s] = covered(weights.coverage, coverage[s], share, alpha[s], x)
            size = len(x)
            if weights.gate is None:
                argument = weights.combine @ torch.cat([x, context]) + weights.combine_bias
            else:
                z = (weights.gate.weight @ torch.cat([x, context]) + weights.gate.bias).sigmoid()
                of_state = weights.combine[:, :size] @ x + weights.combine_bias
                of_context = weights.combine[:, size:] @ context + weights.gate.context_bias
                argument = z * of_state + (1 - z) * of_context
            if weights.output_norm is not None:
                argument = standard(argument) * weights.output_norm[0] + weights.output_norm[1]
            o = argument.tanh()
            outputs[-1].append(o)
            attentions[-1].append(functional.pad(alpha, (0, given["keys"].shape[1] - length)))
        states.append(layers)
        lasts.append(o)
        if coverage is not None:
            coverages.append(torch.stack([*coverage[:length], *(c * 0.0 for c in coverage[length:])]))
    after = tuple(
        tuple(
            torch.stack([states[row][k][n] for row in range(len(states))]) for n in range(len(states[0][k]))
        )
        for k in range(len(weights.layers))
    )
    last = AttentionalLSTMState(after, torch.stack(lasts), torch.stack(coverages) if coverages else None)
    return (
        torch.stack([torch.stack(each) for each in outputs]),
        torch.stack([torch.stack(each) for each in attentions]),
        last,
    )


@pytest.mark.parametrize("sizes", [SIZES, ODD], ids=["usual", "ones"])
@pytest.mark.parametrize("case", [case for case in PARTS if not case.dropout], ids=str)
def test_the_definition(case: Case, sizes: Any) -> None:
    make = Make("cpu")
    given, lengths = arguments(make, case, sizes), lengths_of(case, sizes, "cpu")
    assert_same_function(
        lambda **tensors: econmt_ops.attentional_lstm(
            **tensors, lengths=lengths, **options(case), implementation="reference"
        ),
        lambda **tensors: naive(case, lengths, **tensors),
        given,
    )


@each_implementation("attentional_lstm")
@pytest.mark.parametrize("case", PARTS, ids=str)
def test_values_and_gradients(case: Case, implementation: str) -> None:
    if implementation == "reference":
        return
    make = Make("cpu")
    given, lengths = arguments(make, case, SIZES), lengths_of(case, SIZES, "cpu")
    for dtype, blocks in ((torch.float64, False), (torch.float32, True), (torch.bfloat16, False)):
        if blocks:
            given["inputs"] = given["inputs"].repeat(1, 3, 1)
        rounded = to(dtype, given)

        def call(name: str, **tensors: Any) -> Any:
            return econmt_ops.attentional_lstm(
                **tensors, lengths=lengths, **options(case), implementation=name
            )

        def ours(**tensors: Any) -> Any:
            return call(implementation, **tensors)

        def theirs(**tensors: Any) -> Any:
            return call("reference", **tensors)

        assert_same_function(ours, theirs, rounded, dtype)


@pytest.mark.parametrize("stash", ["least", "outputs", "attention", "cells", "gates"])
@pytest.mark.parametrize(
    "case", [Case("lnlstm", "gru", normed=True), Case("gru", "sum", gated=True)], ids=str
)
def test_every_stash_in_blocks(case: Case, stash: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt_ops.core.chunks._BLOCK_BYTES", 3000)
    make = Make("cpu")
    given, lengths = arguments(make, case, SIZES), lengths_of(case, SIZES, "cpu")
    given["inputs"] = make(SIZES.B, 7, SIZES.I)

    def call(**tensors: Any) -> Any:
        return econmt_ops.attentional_lstm(
            **tensors, lengths=lengths, **options(case), implementation="recompute", stash=stash
        )

    assert_same_function(call, lambda **tensors: naive(case._replace(), lengths, **tensors), given)


@each_implementation("attentional_lstm")
@pytest.mark.parametrize("case", [case for case in PARTS if case.feeds and not case.dropout], ids=str)
def test_steps_that_pass_on_their_state(case: Case, implementation: str) -> None:
    make = Make("cpu")
    given, lengths = arguments(make, case, SIZES), lengths_of(case, SIZES, "cpu")
    at_once, one_by_one = (dict(given) for _ in range(2))
    how = {"lengths": lengths, **options(case), "implementation": implementation}
    outputs, attention, last = econmt_ops.attentional_lstm(**at_once, **how)
    parts = []
    for position in range(SIZES.T):
        one_by_one["inputs"] = given["inputs"][:, position : position + 1]
        output, alpha, one_by_one["state"] = econmt_ops.attentional_lstm(**one_by_one, **how)
        parts.append((output, alpha))
    assert_close([torch.cat(each, 1) for each in zip(*parts, strict=True)], [outputs, attention], 1e-11)
    assert_close(tensors_of(one_by_one["state"]), tensors_of(last), 1e-11)


def test_what_does_not_fit_is_refused() -> None:
    make = Make("cpu")

    def refused(message: str, case: Case, **changes: Any) -> None:
        given = arguments(make, case._replace(full=True), SIZES)
        given["weights"] = given["weights"]._replace(**changes)
        with pytest.raises(ValueError, match=message):
            econmt_ops.attentional_lstm(**given, lengths=None, **options(case))

    covered_case = Case(coverage="tanh")
    coverage = arguments(make, covered_case, SIZES)["weights"].coverage
    refused("coverage.kind must be one of", covered_case, coverage=coverage._replace(kind="sums"))
    refused("coverage needs weights.score", covered_case, score=None)
    refused("coverage needs input_feeding", Case(coverage="tanh", feeds=False))
    refused(
        "coverage.state must be a tensor for kind tanh", covered_case, coverage=coverage._replace(state=None)
    )
    refused("coverage.shares must be", covered_case, coverage=coverage._replace(shares=make(3, 5, 3)))
    refused("gate needs weights.combine_bias", Case(gated=True), combine_bias=None)
    refused("output_norm gain must be", Case(normed=True), output_norm=(make(3), make(8)))
    refused(r"layers\[1\].hidden_bias must be", Case("gru"), layers=tuple(
        layer._replace(hidden_bias=make(3)) if number else layer
        for number, layer in enumerate(arguments(make, Case("gru"), SIZES)["weights"].layers)
    ))  # fmt: skip


def test_parts_that_do_nothing_change_nothing() -> None:
    """A coverage whose key is zero, and a gate that is always half, as matrices of half the size."""
    make = Make("cpu")
    case = Case(coverage="sum", full=True)
    given = arguments(make, case, SIZES)
    weights: AttentionalLSTMWeights = given["weights"]
    plain = econmt_ops.attentional_lstm(
        given["inputs"], given["keys"], given["values"], weights._replace(coverage=None), lengths=None,
        state=given["state"]._replace(coverage=None), implementation="recompute",
    )  # fmt: skip
    coverage = weights.coverage
    assert coverage is not None
    given["weights"] = weights._replace(coverage=coverage._replace(key=torch.zeros_like(coverage.key)))
    found = econmt_ops.attentional_lstm(**given, lengths=None, implementation="recompute")
    assert_close([found[0], found[1]], [plain[0], plain[1]], 1e-14)
    gate = econmt_ops.ContextGate(make(8, 12) * 0, make(8) * 0, make(8) * 0)
    given["weights"] = weights._replace(
        coverage=None, gate=gate, combine=weights.combine * 2, combine_bias=weights.combine_bias * 2
    )
    given["state"] = given["state"]._replace(coverage=None)
    found = econmt_ops.attentional_lstm(**given, lengths=None, implementation="recompute")
    assert_close([found[0], found[1]], [plain[0], plain[1]], 1e-13)


def test_registration() -> None:
    """The operator's fake implementation and autograd, with every part."""
    make = Make("cpu")
    case = Case("lnlstm", "gru", normed=True, gated=True, layer_norm=True, full=True)
    given = arguments(make, case, SIZES)

    def run(inputs: Tensor) -> Tensor:
        return econmt_ops.attentional_lstm(
            **{**given, "inputs": inputs}, lengths=None, implementation="recompute"
        )[0]

    inputs = given["inputs"].requires_grad_()
    compiled: Any = torch.compile(run, backend="aot_eager", fullgraph=True)
    want, got = run(inputs), compiled(inputs)
    assert_close([got], [want], 1e-12)
    assert_close(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(want.sum(), inputs), 1e-12)
