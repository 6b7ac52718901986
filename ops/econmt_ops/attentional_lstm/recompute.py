"""The attentional LSTM by partial forward propagation: stash the small, make the large again.

The forward pass keeps o, h of every layer and, as far as the stash level asks, the attention weights, the cell
states and the gates. The backward pass makes the rest again, a block of steps at a time, in one workspace.
README.md gives the mathematics. Both passes are operators of torch.library, so that FakeTensor and torch.compile
know them; the backward operator itself has no derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.additive_attention.recompute import additive_attention
from econmt_ops.additive_attention.reference import attend
from econmt_ops.additive_attention.scores import clean_keys
from econmt_ops.attentional_lstm.backward import Backward, Gradients, Incoming, Stash
from econmt_ops.attentional_lstm.forward import empty_result, run_forward
from econmt_ops.attentional_lstm.problem import Options, Problem
from econmt_ops.backends import steps as step_functions
from econmt_ops.core.chunks import reaches
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.low_rank import layers_of_tensors, tensors_of_matrices
from econmt_ops.core.precision import accumulate_dtype, explicit_casts
from econmt_ops.core.repeated import Inputs, Repeated, values_of
from econmt_ops.core.scopes import layer
from econmt_ops.core.weights import AttentionalLSTMState, AttentionalLSTMWeights, LSTMState
from econmt_ops.dispatch.registration import custom_op
from econmt_ops.dispatch.traits import Traits
from econmt_ops.lstm.recompute import lstm

TRAITS = Traits(recomputes=True, takes_stash=True, casts=True)

_ARGUMENTS = (
    "Tensor inputs, Tensor keys, Tensor values, Tensor[] input_weights, Tensor[] hidden_weights, Tensor[] biases, "
    "Tensor? query, Tensor? score, Tensor combine, Tensor? combine_bias, Tensor? gain, Tensor? shift, "
    "Tensor? lengths, Tensor? places, Tensor[] first_h, Tensor[] first_c, Tensor first_output"
)
_OPTIONS = "bool residual, float dropout, int seed, bool variational, float scale, str stash, bool compiled"
"""With places (B, T) the inputs are distinct rows (N, I). Matrices and biases may be of another type than the
inputs, in which all is computed; their gradients have theirs. Of factorised matrices the lists of weights have two
entries a layer, the left and the right factor."""
_COUNT = 17
"""How many of the operator's arguments are tensors or lists of them."""


def _problem(arguments: tuple[Any, ...]) -> Problem:
    inputs, keys, values, input_weights, hidden_weights, biases, query, score, combine, bias = arguments[:10]
    gain, shift, lengths, places = arguments[10:14]
    layers = layers_of_tensors(input_weights, hidden_weights, biases)
    *options, compiled = arguments[_COUNT : _COUNT + 7]
    norm = None if gain is None else (gain, shift)
    run = step_functions.steps(compiled)
    return Problem(
        inputs,
        places,
        keys,
        values,
        layers,
        query,
        score,
        combine,
        bias,
        norm,
        lengths,
        Options(*options),
        run,
    )


@custom_op(
    "econmt_ops::attentional_lstm",
    schema=f"({_ARGUMENTS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    first_h, first_c, first_output = arguments[14:_COUNT]
    result = run_forward(_problem(arguments), first_h, first_c, first_output, arguments[-1])
    return tuple(result)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, keys, biases, places, stash = (arguments[place] for place in (0, 1, 5, 13, _COUNT + 5))
    hidden = biases[0].shape[0] // 4
    steps = (inputs if places is None else places).shape[1]
    return tuple(empty_result(inputs, steps, keys, hidden, len(biases), stash, arguments[-1]))


@custom_op(
    "econmt_ops::attentional_lstm_backward",
    schema="(Tensor? doutputs, Tensor? dattention, Tensor? dlast_h, Tensor? dlast_c, Tensor outputs, "
    f"Tensor? attention, Tensor h, Tensor c, Tensor gates, {_ARGUMENTS}, {_OPTIONS}) -> Tensor[]",
)
def _backward(*arguments: Any) -> list[Tensor]:
    call = arguments[9:]
    problem = _problem(call)
    stash = Stash(*arguments[4:9], *call[14:_COUNT])
    backward = Backward(problem, stash, Incoming(*arguments[:4]))
    return _in_order(backward.run(), backward, _tensors(call))


def _tensors(call: tuple[Any, ...]) -> list[Tensor | None]:
    """The operator's arguments that have gradients, lists laid open."""
    return [*call[:3], *call[3], *call[4], *call[5], *call[6:12], *call[14], *call[15], call[16]]


def _in_order(sums: Gradients, backward: Backward, arguments: list[Tensor | None]) -> list[Tensor]:
    """The gradients in the order and types of the operator's ``arguments``; empty for arguments left out."""
    scores = sums.scores
    gradients = [
        sums.inputs,
        scores.key_gradient(),
        sums.values,
        *tensors_of_matrices([layer.input for layer in sums.layers]),
        *tensors_of_matrices([layer.hidden for layer in sums.layers]),
        *(layer.bias for layer in sums.layers),
        sums.query,
        scores.score,
        sums.combine,
        sums.combine_bias,
        *((None, None) if scores.norm is None else scores.norm),
    ]
    # Copies of their own: an operator's results may share memory neither with each other nor with arguments.
    first = [*(dh.clone() for dh in backward.dh), *(dc.clone() for dc in backward.dc), backward.dfed.clone()]
    results = []
    for argument, gradient in zip(arguments, [*gradients, *first], strict=True):
        if argument is None or gradient is None:
            results.append(sums.inputs.new_empty(0))
        else:
            results.append(gradient.to(argument.dtype))
    return results


@_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    call = arguments[9:]
    nothing = call[0].new_empty(0)
    return [
        nothing if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in _tensors(call)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    outputs, attention, h, c, gates, _, _ = output
    ctx.set_materialize_grads(False)
    ctx.sizes = [len(item) for item in inputs[:_COUNT] if isinstance(item, list | tuple)]
    ctx.options = inputs[_COUNT : _COUNT + 7]
    keeps_attention = reaches(inputs[_COUNT + 5], "attention")
    flat = [
        part for item in inputs[:_COUNT] for part in (item if isinstance(item, list | tuple) else (item,))
    ]
    ctx.save_for_backward(outputs, attention if keeps_attention else None, h, c, gates, *flat)


def _differentiate(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
    doutputs, dattention, _, _, _, dlast_h, dlast_c = incoming
    kept, flat = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    arguments = _unflatten(list(flat), ctx.sizes)
    with explicit_casts(kept[0]):
        gradients = _backward(doutputs, dattention, dlast_h, dlast_c, *kept, *arguments, *ctx.options)
    # Lengths and places, left out of the gradients, come after gain and shift.
    place = 3 + sum(ctx.sizes[:3]) + 6
    gradients[place:place] = [None, None]
    shaped = _unflatten(
        [None if gradient is None or gradient.numel() == 0 else gradient for gradient in gradients], ctx.sizes
    )
    return (*shaped, *(None for _ in range(8)))


def _unflatten(flat: list[Any], sizes: list[int]) -> list[Any]:
    """The operator's tensor arguments from a flat list: 3 tensors, 3 lists, 8 tensors, 2 lists, 1 tensor.

    Args:
        flat: of tensors, or None. sizes: of the lists.
    """
    result, position, left = [], 0, iter(sizes)
    for kind in "tttlllttttttttllt":
        size = next(left) if kind == "l" else 1
        part = flat[position : position + size]
        result.append(part if kind == "l" else part[0])
        position += size
    return result


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def attentional_lstm(
    inputs: Inputs,
    keys: Tensor,
    values: Tensor,
    weights: AttentionalLSTMWeights,
    *,
    lengths: Tensor | None,
    state: AttentionalLSTMState,
    input_feeding: bool,
    residual: bool,
    dropout: float,
    dropout_seed: int | None,
    variational: bool,
    layer_norm: tuple[Tensor, Tensor] | None,
    scale: float,
    stash: str = "attention",
    compiled: bool = False,
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """See `econmt_ops.attentional_lstm`; all arguments are given, checked and, but for matrices and biases, cast."""
    if not input_feeding:
        stack = lstm(
            inputs,
            weights.layers,
            state=state.layers,
            lengths=None,
            reverse=False,
            residual=residual,
            dropout=dropout,
            dropout_seed=dropout_seed,
            variational=variational,
            stash=stash,
            compiled=compiled,
        )
        return _attend_at_once(stack, keys, values, weights, lengths, layer_norm, scale, compiled)
    gain, shift = (None, None) if layer_norm is None else layer_norm
    if weights.score is not None:
        keys = clean_keys(keys, lengths)
    arguments = (
        values_of(inputs),
        keys,
        values,
        tensors_of_matrices([part.input for part in weights.layers]),
        tensors_of_matrices([part.hidden for part in weights.layers]),
        [part.bias for part in weights.layers],
        weights.query,
        weights.score,
        weights.combine,
        weights.combine_bias,
        gain,
        shift,
        lengths,
        inputs.places if isinstance(inputs, Repeated) else None,
        [h for h, _ in state.layers],
        [c for _, c in state.layers],
        state.output,
    )
    flat = [part for item in arguments for part in (item if isinstance(item, list) else (item,))]
    keep = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in flat)
    seed = 0 if dropout_seed is None else dropout_seed
    options = (residual, dropout, seed, variational, scale, stash, compiled)
    outputs, attention, _, _, _, last_h, last_c = _forward(*arguments, *options, keep)
    layers = tuple(zip(last_h.unbind(0), last_c.unbind(0), strict=True))
    outputs = outputs.transpose(0, 1)
    return outputs, attention.transpose(0, 1), AttentionalLSTMState(layers, outputs[:, -1])


def _attend_at_once(
    stack: tuple[Tensor, LSTMState],
    keys: Tensor,
    values: Tensor,
    weights: AttentionalLSTMWeights,
    lengths: Tensor | None,
    layer_norm: tuple[Tensor, Tensor] | None,
    scale: float,
    compiled: bool,
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """Without input feeding nothing of the attention is recurrent: all steps at once, after the stack."""
    h, layers = stack
    query = h if weights.query is None else functional.linear(h, weights.query.to(h.dtype))
    with layer("attention"):
        if weights.score is None:
            padding = None if lengths is None else padding_mask(lengths, keys.shape[1], keys.device)
            scores = torch.bmm(query, zero_padding(keys, padding).transpose(1, 2))
            scores = scores.to(accumulate_dtype(h.dtype)) * scale
            context, attention = attend(scores, zero_padding(values, padding), padding)
        else:
            context, attention = additive_attention(
                query, keys, values, weights.score, lengths=lengths, layer_norm=layer_norm, compiled=compiled
            )
    bias = None if weights.combine_bias is None else weights.combine_bias.to(h.dtype)
    combined = functional.linear(torch.cat([h, context], 2), weights.combine.to(h.dtype), bias)
    outputs = combined.tanh()
    return outputs, attention, AttentionalLSTMState(layers, outputs[:, -1])
