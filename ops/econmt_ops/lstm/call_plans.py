"""Calls of LSTM layers on a GPU that are like earlier ones: they are neither checked nor decided upon again.

A key holds everything on which the checks and the choice of an implementation depend: shapes, types and devices of all
tensors, autograd, autocast, the precision of float32 products and the modes of `econmt_ops.dispatch`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends.triton import runs_on
from econmt_ops.core.precision import compute_dtype, recurrent_tf32
from econmt_ops.core.shapes import Shapes, check_dropout
from econmt_ops.core.weights import LSTMWeights
from econmt_ops.dispatch.plans import Plans
from econmt_ops.dispatch.rule import MODE, can_run
from econmt_ops.dispatch.session import current_session
from econmt_ops.dispatch.traits import Candidate
from econmt_ops.lstm import triton as kernels
from econmt_ops.lstm.cudnn import MOST_STEPS, cudnn_stack
from econmt_ops.lstm.eager_layer import is_plain, run_eagerly
from econmt_ops.lstm.persistent_layer import LayerPlan, plan_of
from econmt_ops.lstm.persistent_operands import LayerSettings, LayerTensors
from econmt_ops.products.stack import StackOptions, run_stack


class SplitLSTMWeights(NamedTuple):
    """One LSTM layer with both biases of `torch.nn.LSTM`: (4H, I), (4H, H), (4H,) and (4H,)."""

    input: Tensor
    hidden: Tensor
    bias: Tensor
    other_bias: Tensor

    def merged(self) -> LSTMWeights:
        """Returns the layer with the sum of its biases."""
        return LSTMWeights(self.input, self.hidden, self.bias + self.other_bias)


class StackPlan(NamedTuple):
    """Plan of a call over a stack.

    Attributes:
        settings: Settings of each layer; None: cuDNN runs the stack.
        keep: True if a backward pass will follow.
        layers: Plans of the layers by their number and the type of their last c, filled as they are called first.
    """

    settings: LayerSettings | None
    keep: bool
    layers: dict[tuple[int, torch.dtype], LayerPlan]


PLANS: Plans[StackPlan] = Plans()


def key_of(
    kind: str, inputs: object, layers: object, state: object, lengths: object, options: tuple[Hashable, ...]
) -> tuple[Any, ...] | None:
    """Returns what the plan of a call of the op ``kind`` depends on, or None if it can have none.

    Tensors are as the caller gave them, checked or not; ``options`` are other arguments on which the plan depends.
    """
    if torch.compiler.is_compiling() or MODE.device is not None or not isinstance(inputs, Tensor):
        return None
    device = inputs.device
    if type(layers) is not tuple or (device.type != "cuda" and not runs_on(device)):
        return None
    tensors = [inputs]
    for layer in layers:
        if type(layer) not in (LSTMWeights, SplitLSTMWeights):
            return None
        tensors += layer
    if state is not None:
        if type(state) is not tuple or any(type(pair) is not tuple or len(pair) != 2 for pair in state):
            return None
        for pair in state:
            tensors += pair
    if lengths is not None:
        tensors.append(lengths)  # type: ignore[arg-type]
    if not is_plain(tensors) or current_session() is not None:
        return None
    dtype = compute_dtype(inputs)
    return (
        kind,
        tuple([(each.shape, each.dtype, each.device) for each in tensors]),
        tuple([len(layer) for layer in layers]),
        state is None,
        lengths is None,
        torch.is_grad_enabled() and any(each.requires_grad for each in tensors),
        dtype,
        dtype == torch.float32 and recurrent_tf32(),
        torch.backends.cudnn.enabled,
        MODE.rules_only,
        MODE.captured,
        options,
    )  # fmt: skip


def key_of_lstm(
    inputs: object,
    layers: object,
    state: object,
    options: StackOptions,
    implementation: str,
    stash: str = "auto",
) -> tuple[Any, ...] | None:
    """Returns `key_of` a call of `econmt_ops.lstm`."""
    facts = implementation, stash, options.reverse, options.residual, options.dropout != 0.0
    return key_of("lstm", inputs, layers, state, options.lengths, facts)


def merged(layers: Any) -> Any:
    """Returns the layers of a call, those with two biases with the sum of them."""
    if type(layers) is not tuple:
        return layers
    return tuple([layer.merged() if type(layer) is SplitLSTMWeights else layer for layer in layers])


def add_plan(
    key: tuple[Any, ...] | None, candidate: Candidate, dtype: torch.dtype, inputs: Any, layers: Sequence[Any]
) -> None:
    """Caches the launch plan of a call that runs as a persistent kernel or in cuDNN.

    ``key`` is what `key_of` returned, ``dtype`` the compute type.
    """
    if key is None:
        return
    kind, _, _, _, is_full, keep, *_, options = key
    if candidate.function is kernels.lstm:
        products = kernels.products_of(inputs.to(dtype) if inputs.dtype != dtype else inputs, layers)
        if products is not None:
            reverse = (options[2],) if kind == "lstm" else (False, True)
            settings = LayerSettings(dtype, products, candidate.options.get("stash", "gates"), reverse)
            PLANS.add(key, StackPlan(settings, keep, {}))
        return
    is_forward = kind == "lstm" and is_full and options[2:] == (False, False, False)
    is_float32 = dtype == inputs.dtype == torch.float32 and inputs.is_cuda
    if candidate.name == "reference" and is_forward and is_float32:
        same = all(part.dtype == dtype for layer in layers for part in layer)
        if same and torch.cudnn_is_acceptable(inputs) and inputs.shape[1] <= MOST_STEPS:
            PLANS.add(key, StackPlan(None, keep, {}))


def run_planned(
    plan: StackPlan,
    inputs: Any,
    layers: Sequence[Sequence[Any]],
    state: Sequence[tuple[Tensor, Tensor]],
    options: StackOptions,
    resets: Tensor | None = None,
    one_type: bool = False,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Runs a stack by its plan; returns outputs (B, T, D H) and the last (h, c) of each layer, (D, B, H) each.

    Takes inputs (B, T, I), the weights of each layer's directions, each as `SplitLSTMWeights` or `LSTMWeights`, the
    first (h, c) of each layer, none for zeros, and ``resets`` as in `LayerTensors`, which a plan of `resets_plan`
    requires. ``one_type``: True for c in the type of h.
    """
    lengths = options.lengths
    if lengths is not None:
        Shapes("lstm").bounded("lengths", lengths, inputs.shape[1])
    if options.dropout != 0.0:
        check_dropout("lstm", options.dropout, options.seed)
    if inputs.is_cuda and inputs.device.index != torch.cuda.current_device():
        with torch.cuda.device(inputs.device):
            return run_planned(plan, inputs, layers, state, options, resets, one_type)
    settings = plan.settings
    if settings is None:
        outputs, h, c = cudnn_stack(inputs, layers, state)
        return outputs, [(h, c)]
    if lengths is not None:
        lengths = lengths.to(inputs.device, non_blocking=True).contiguous()
    cells = settings.dtype if one_type else torch.float32

    def run(number: int, read: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        weights, first = layers[number], state[number] if state else None
        layer = plan.layers.get((number, cells))
        if layer is None:
            tensors = LayerTensors(read.transpose(0, 1), weights, first, lengths, None, resets)
            layer = plan_of(settings._replace(cells=cells), tensors, plan.keep)
            plan.layers[number, cells] = layer
        outputs, last_h, last_c = run_eagerly(layer, read, first, lengths, weights, resets)
        return outputs, (last_h, last_c)

    return run_stack(run, inputs, len(layers), options)


def run_whole(
    plan: StackPlan,
    inputs: Any,
    layers: Sequence[Sequence[Any]],
    state: Sequence[Tensor] | None,
    options: StackOptions,
    directions: int = 1,
    resets: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Runs a stack as `run_planned` does, with the first and last (h, c) of all layers in one tensor each.

    ``state``: (D L, B, H) each, or None for zeros. The results have one type but where cuDNN runs.
    """
    parts: Any = ()
    if state is not None:
        parts = tuple(zip(*(torch.split(part, directions) for part in state), strict=True))
    outputs, last = run_planned(plan, inputs, layers, parts, options, resets, one_type=True)
    if len(last) == 1:
        return outputs, last[0]
    return outputs, (torch.cat([h for h, _ in last]), torch.cat([c for _, c in last]))


def resets_plan(
    inputs: Tensor,
    layers: Sequence[tuple[Any, ...]],
    state: tuple[Tensor, ...] | None,
    options: StackOptions,
    implementation: str,
) -> StackPlan | None:
    """Returns the plan of an LSTM stack whose states begin anew at some steps, by launches that do so themselves.

    Takes inputs (B, T, I), the weights of each layer's directions, bottom first, and the first h and c, (D L, B, H)
    each, or None for zeros. Returns None if no such launch runs this call.
    """
    flat = tuple([weights for layer in layers for weights in layer])
    start, directions = None if state is None else (state,), len(layers[0])
    key = key_of("resets", inputs, flat, start, options.lengths, (implementation, directions))
    if key is None or options.dropout >= 1.0:
        return None
    plan = PLANS.get(key)
    if plan is None:
        keep = key[5]
        dtype, traits = compute_dtype(inputs), kernels.TRAITS
        if implementation == "auto":
            serves = can_run(traits, inputs.device.type, dtype)
        else:
            serves = implementation == "triton" and runs_on(inputs.device)
        products = kernels.products_of(inputs[:, :0].to(dtype), merged(flat)) if serves else None
        if products is None:
            return None
        by_rule = MODE.rules_only and implementation == "auto"
        stash = traits.stash_in_model(dtype) if by_rule else "gates"
        plan = StackPlan(LayerSettings(dtype, products, stash, (False, True)[:directions]), keep, {})
        PLANS.add(key, plan)
    return plan
