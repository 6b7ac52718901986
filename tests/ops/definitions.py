"""Naive definitions of all ops: row by row and step by step, over exactly the positions that a row has.

Neither masks nor batches nor fused gates can go wrong in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import econmt_ops

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Any, State], tuple[Tensor, State]]
"""One step of one layer of one row: from x (I,), the weights and the states before to h (H,) and the states after."""


def matrix(weight: Tensor | econmt_ops.LowRank) -> Tensor:
    """Returns a matrix, multiplied out if it is given as factors."""
    return weight.left @ weight.right if isinstance(weight, econmt_ops.LowRank) else weight


def normalise(x: Tensor, gain: Tensor | float = 1.0, bias: Tensor | float = 0.0) -> Tensor:
    """Layer normalisation of the last axis."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias


def whole(layers: Sequence[Any]) -> list[Any]:
    """Returns layers with their matrices multiplied out."""
    return [
        econmt_ops.LSTMWeights(matrix(layer.input), matrix(layer.hidden), layer.bias)
        if isinstance(layer, econmt_ops.LowRankLSTMWeights)
        else layer
        for layer in layers
    ]


def lstm_step(x: Tensor, w: econmt_ops.LSTMWeights, state: State) -> tuple[Tensor, State]:
    i, f, g, o = (w.input @ x + w.hidden @ state[0] + w.bias).chunk(4)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h, (h, c)


def gated(read: Tensor, recurrent: Tensor, before: Tensor) -> Tensor:
    """A gated recurrent unit after a step, from what the input and the state before give to its gates."""
    (ru, zu, nu), (rv, zv, nv) = read.chunk(3, -1), recurrent.chunk(3, -1)
    z = (zu + zv).sigmoid()
    return (1 - z) * (nu + (ru + rv).sigmoid() * nv).tanh() + z * before


def gru_step(x: Tensor, w: econmt_ops.GRUWeights, state: State) -> tuple[Tensor, State]:
    h = gated(w.input @ x + w.bias, w.hidden @ state[0] + w.hidden_bias, state[0])
    return h, (h,)


def lnlstm_step(x: Tensor, w: Any, state: State) -> tuple[Tensor, State]:
    if isinstance(w, econmt_ops.LayerNormLSTMWeights):
        sums = normalise(w.input @ x, w.input_gain) + normalise(w.hidden @ state[0], w.hidden_gain, w.bias)
    else:
        raw = w.input @ x + w.hidden @ state[0] + w.bias
        sums = torch.cat([normalise(part) for part in raw.chunk(4)]) * w.gain + w.shift
    i, f, g, o = sums.chunk(4)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * normalise(c, w.cell_gain, w.cell_bias).tanh()
    return h, (h, c)


def sru_step(x: Tensor, w: econmt_ops.GateWeights, state: State) -> tuple[Tensor, State]:
    u, f, r, *view = (w.input @ x + w.bias).split(state[0].shape[0])
    c = f.sigmoid() * state[0] + (1 - f.sigmoid()) * u
    return r.sigmoid() * c.tanh() + (1 - r.sigmoid()) * (view[0] if view else x), (c,)


def ssru_step(x: Tensor, w: econmt_ops.GateWeights, state: State) -> tuple[Tensor, State]:
    u, f = (w.input @ x + w.bias).chunk(2)
    c = f.sigmoid() * state[0] + (1 - f.sigmoid()) * u
    return c.clamp(min=0), (c,)


def qrnn_step(x: Tensor, w: econmt_ops.GateWeights, state: State) -> tuple[Tensor, State]:
    read = x if len(state) == 1 else torch.cat([x, state[1]])
    z, f, o = (w.input @ read + w.bias).chunk(3)
    c = f.sigmoid() * state[0] + (1 - f.sigmoid()) * z.tanh()
    return o.sigmoid() * c, (c, x)[: len(state)]


def min_gru_step(x: Tensor, w: econmt_ops.GateWeights, state: State) -> tuple[Tensor, State]:
    u, f = (w.input @ x + w.bias).chunk(2)
    h = f.sigmoid() * state[0] + (1 - f.sigmoid()) * u
    return h, (h,)


def min_lstm_step(x: Tensor, w: econmt_ops.GateWeights, state: State) -> tuple[Tensor, State]:
    u, f, i = (w.input @ x + w.bias).chunk(3)
    f, i = f.sigmoid(), i.sigmoid()
    h = f / (f + i) * state[0] + i / (f + i) * u
    return h, (h,)


def gilr_lstm_step(x: Tensor, w: econmt_ops.GILRLSTMWeights, state: State) -> tuple[Tensor, State]:
    s, c = state
    j, g = (w.surrogate @ x + w.surrogate_bias).chunk(2)
    z, f, i, o = (w.input @ x + w.hidden @ s + w.bias).chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * z.tanh()
    return o.sigmoid() * c, (g.sigmoid() * s + (1 - g.sigmoid()) * j.tanh(), c)


DECODER_STEPS: dict[type[Any], Step] = {
    econmt_ops.LSTMWeights: lstm_step,
    econmt_ops.GRUWeights: gru_step,
    econmt_ops.LayerNormLSTMWeights: lnlstm_step,
    econmt_ops.LayerNormPerGateLSTMWeights: lnlstm_step,
}
"""Steps of the layers of a decoder by their weights."""


def stack_step(
    step: Step, x: Tensor, layers: Sequence[Any], states: list[State], residual: bool, masks: Sequence[Any]
) -> Tensor:
    """One step of one row through all layers; changes the states. Masks (H,) or None, a layer."""
    for k, weights in enumerate(layers):
        x = x if masks[k] is None else x * masks[k]
        h, states[k] = step(x, weights, states[k])
        x = h + x if residual and k > 0 else h
    return x


def masks_at(masks: Sequence[Tensor | None], count: int, row: int, t: int) -> list[Tensor | None]:
    """The masks of a position, of masks (B, T, H) or (B, 1, H) or None, a layer."""
    return [
        None if mask is None else mask[row, min(t, mask.shape[1] - 1)] for mask in masks or [None] * count
    ]


def stacked(states: list[list[State]]) -> tuple[State, ...]:
    """The states of all rows as those of a batch, from rows of layers of states."""
    return tuple(tuple(map(torch.stack, zip(*layer, strict=True))) for layer in zip(*states, strict=True))


def recurrent(
    step: Step,
    inputs: Tensor,
    layers: Sequence[Any],
    state: Sequence[State],
    lengths: Tensor | None = None,
    reverse: bool = False,
    residual: bool = False,
    masks: Sequence[Tensor | None] = (),
) -> tuple[Tensor, tuple[State, ...]]:
    """A stack of layers of any cell, with one step of a layer."""
    batch, steps, _ = inputs.shape
    rows, lasts, layers = [], [], whole(layers)
    for b in range(batch):
        length = steps if lengths is None else int(lengths[b])
        last = [tuple(part[b] for part in parts) for parts in state]
        row = [inputs.new_zeros(state[-1][0].shape[1])] * steps
        for t in range(length - 1, -1, -1) if reverse else range(length):
            row[t] = stack_step(
                step, inputs[b, t], layers, last, residual, masks_at(masks, len(layers), b, t)
            )
        rows.append(torch.stack(row))
        lasts.append(last)
    return torch.stack(rows), stacked(lasts)


def bidirectional_lstm(
    inputs: Tensor, forward: Any, backward: Any, lengths: Tensor | None = None
) -> tuple[Tensor, tuple[State, State]]:
    zero = inputs.new_zeros(len(inputs), len(forward.bias) // 4)
    left, (last,) = recurrent(lstm_step, inputs, (forward,), ((zero, zero),), lengths)
    right, (first,) = recurrent(lstm_step, inputs, (backward,), ((zero, zero),), lengths, reverse=True)
    return torch.cat([left, right], 2), (last, first)


def additive_scores(hidden: Tensor, score: Tensor, norm: tuple[Tensor, Tensor] | None) -> Tensor:
    """Scores (S,) of sums (S, A) of a query, keys and coverage."""
    return (hidden if norm is None else normalise(hidden, *norm)).tanh() @ score


def attend(scores: Tensor, values: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """Context (E,) and weights (S,), of scores of a row's positions, of which there may be none."""
    weights = torch.softmax(scores, 0)
    return weights @ values, functional.pad(weights, (0, positions - len(weights)))


def additive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    score_weight: Tensor,
    lengths: Tensor | None = None,
    layer_norm: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    contexts, weights = [], []
    for b in range(len(query)):
        length = keys.shape[1] if lengths is None else int(lengths[b])
        own = keys[b, :length], values[b, :length]
        pairs = [
            attend(additive_scores(q + own[0], score_weight, layer_norm), own[1], keys.shape[1])
            for q in query[b]
        ]
        contexts.append(torch.stack([context for context, _ in pairs]))
        weights.append(torch.stack([weight for _, weight in pairs]))
    return torch.stack(contexts), torch.stack(weights)


def covered(
    coverage: econmt_ops.Coverage, before: Tensor, shares: Tensor, attention: Tensor, h: Tensor
) -> Tensor:
    """The coverage (S, W) of a row's positions after a step, from their attention (S,)."""
    attention = attention.unsqueeze(1)
    if coverage.kind == "sum":
        return before + shares * attention
    read = shares + coverage.attention * attention + coverage.state @ h
    recurrent = before @ coverage.recurrent.t()
    if coverage.kind == "gru":
        return gated(read, recurrent, before)
    name = "softplus" if coverage.kind == "softrelu" else coverage.kind
    result: Tensor = getattr(functional, name)(read + recurrent)
    return result


def output_of(weights: Any, h: Tensor, context: Tensor) -> Tensor:
    """o of a step."""
    bias = 0.0 if weights.combine_bias is None else weights.combine_bias
    both = torch.cat([h, context])
    if weights.gate is None:
        argument = weights.combine @ both + bias
    else:
        z = (weights.gate.weight @ both + weights.gate.bias).sigmoid()
        of_state = weights.combine[:, : len(h)] @ h + bias
        of_context = weights.combine[:, len(h) :] @ context + weights.gate.context_bias
        argument = z * of_state + (1 - z) * of_context
    return (argument if weights.output_norm is None else normalise(argument, *weights.output_norm)).tanh()


def attentional_lstm(
    inputs: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Any,
    state: econmt_ops.AttentionalLSTMState,
    lengths: Tensor | None = None,
    layer_norm: tuple[Tensor, Tensor] | None = None,
    input_feeding: bool = True,
    scale: float = 1.0,
    residual: bool = False,
    masks: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor, econmt_ops.AttentionalLSTMState]:
    outputs, attentions, lasts, coverages = [], [], [], []
    layers = whole(weights.layers)
    step = DECODER_STEPS[type(layers[0])]
    for b in range(len(inputs)):
        length = keys.shape[1] if lengths is None else int(lengths[b])
        own_keys, own_values = keys[b, :length], values[b, :length]
        states = [tuple(part[b] for part in parts) for parts in state.layers]
        o, row, attention = state.output[b], [], []
        coverage = None if state.coverage is None else state.coverage[b, :length]
        for t in range(inputs.shape[1]):
            x = torch.cat([inputs[b, t], o]) if input_feeding else inputs[b, t]
            h = stack_step(step, x, layers, states, residual, masks_at(masks, len(states), b, t))
            query = h if weights.query is None else weights.query @ h
            if weights.score is None:
                scores = scale * (own_keys @ query)
            else:
                hidden = query + own_keys
                if coverage is not None:
                    hidden = hidden + coverage @ weights.coverage.key.t()
                scores = additive_scores(hidden, weights.score, layer_norm)
            context, alpha = attend(scores, own_values, keys.shape[1])
            if coverage is not None:
                shares = weights.coverage.shares[b, :length]
                coverage = covered(weights.coverage, coverage, shares, alpha[:length], h)
            o = output_of(weights, h, context)
            row.append(o)
            attention.append(alpha)
        outputs.append(torch.stack(row))
        attentions.append(torch.stack(attention))
        lasts.append(states)
        if coverage is not None:
            coverages.append(functional.pad(coverage, (0, 0, 0, keys.shape[1] - length)))
    after = torch.stack(coverages) if coverages else None
    last = econmt_ops.AttentionalLSTMState(stacked(lasts), torch.stack([row[-1] for row in outputs]), after)
    return torch.stack(outputs), torch.stack(attentions), last


def linear_recurrence(
    decay: Tensor,
    inputs: Tensor,
    initial: Tensor | None = None,
    lengths: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs and last states: sums over all earlier inputs, each times the decays since; no recurrence."""
    batch, steps, hidden = inputs.shape
    rows, states = [], []
    for b in range(batch):
        length = steps if lengths is None else int(lengths[b])
        order = list(range(length))[:: -1 if reverse else 1]
        row = [inputs.new_zeros(hidden)] * steps
        last = inputs.new_zeros(hidden) if initial is None else initial[b]
        for now in range(length):
            total = inputs.new_zeros(hidden)
            for then in range(now + 1):
                total = total + decay[b, order[then + 1 : now + 1]].prod(0) * inputs[b, order[then]]
            if initial is not None:
                total = total + decay[b, order[: now + 1]].prod(0) * initial[b]
            row[order[now]] = last = total
        rows.append(torch.stack(row))
        states.append(last)
    return torch.stack(rows), torch.stack(states)
