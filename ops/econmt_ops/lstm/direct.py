"""An LSTM layer on a GPU without torch.library, whose calls take the host longer than small layers take the GPU.

Eager calls on ordinary tensors go through one `torch.autograd.Function` a layer; whatever looks into a call, such as
torch.compile, fake tensors or function transforms, goes through the operators.

Shapes: D directions, B batch, T steps, I input size, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from econmt_ops.core.precision import MatmulTF32
from econmt_ops.lstm.persistent_layer import PersistentLayer
from econmt_ops.lstm.persistent_passes import Walked, run_backward, run_forward

if TYPE_CHECKING:
    from econmt_ops.backends.triton.persistent import Partition

_PLAIN = (Tensor, nn.Parameter)


def is_plain(tensors: Iterable[object]) -> bool:
    """Returns True if an operation on these tensors runs eagerly and nothing else sees it."""
    return (
        all(type(tensor) in _PLAIN for tensor in tensors)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


class LayerCall(NamedTuple):
    """The arguments of a layer that are not differentiable."""

    dtype: torch.dtype
    """Compute type."""
    products: str
    """See `Layer`."""
    stash: str
    reverse: tuple[bool, ...]
    """True for each direction that walks from the last step to the first."""
    together: str
    lengths: Tensor | None
    """(B,) on the device, or None."""
    biases: int
    """Biases of a direction, one or two."""
    partitions: tuple[Partition | None, Partition | None] = (None, None)
    """Partitions of the forward and backward kernels, if they are known already."""


def _layer(
    call: LayerCall, inputs: Tensor, state: tuple[Any, Any], weights: Sequence[Tensor]
) -> PersistentLayer:
    """Returns the arguments as `Layer` has them; inputs (T, B, I)."""
    each = 2 + call.biases
    h, c = state
    return PersistentLayer(
        inputs,
        list(weights[::each]),
        list(weights[1::each]),
        list(weights[2::each]),
        [] if h is None else list(h.unbind(0)),
        [] if c is None else list(c.unbind(0)),
        call.lengths,
        None,
        list(call.reverse),
        call.stash,
        call.products,
        call.together,
    )


_NOTHING = nullcontext()


def plain_products(device_type: str, call: LayerCall) -> AbstractContextManager[None]:
    """Returns a context without autocast in which float32 products have the precision of a layer's recurrence."""
    if call.dtype == torch.float32 and device_type == "cuda":
        return _Float32Products(call.products == "float16")
    return _WithoutAutocast(device_type) if torch.is_autocast_enabled(device_type) else _NOTHING


class _WithoutAutocast:
    """Context without autocast; `torch.autocast` takes ten times as long."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device_type, True)


class _Float32Products(MatmulTF32):
    """Context without autocast in which float32 products on a GPU use TF32 or not."""

    def __enter__(self) -> None:
        self._autocast = torch.is_autocast_enabled("cuda")
        if self._autocast:
            torch.set_autocast_enabled("cuda", False)
        super().__enter__()

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036  as that of the base class
        super().__exit__(*error)
        if self._autocast:
            torch.set_autocast_enabled("cuda", True)


def _forward(
    call: LayerCall, keep: bool, inputs: Tensor, h: Tensor | None, c: Tensor | None, weights: Sequence[Tensor]
) -> tuple[Any, Tensor, Tensor]:
    """Returns the results, the inputs as they were multiplied, and the outputs (B, T, D H)."""
    batch, steps, _ = inputs.shape
    width = len(call.reverse) * weights[1].shape[1]
    # Time comes first in memory; the tensor that is returned is no view, so that it may be changed in place.
    outputs = torch.empty_strided(
        (batch, steps, width), (width, batch * width, 1), dtype=call.dtype, device=inputs.device
    )
    layer = _layer(call, inputs.transpose(0, 1), (h, c), weights)
    others = weights[3 :: 2 + call.biases] if call.biases > 1 else ()
    with plain_products(inputs.device.type, call):
        result, rows = run_forward(
            layer, keep, call.dtype, others, outputs.transpose(0, 1), call.partitions[0]
        )
    return result, rows, outputs


class _LayerFunction(torch.autograd.Function):
    """One layer in one or both directions: outputs (B, T, D H), last h and last c (D, B, H)."""

    @staticmethod
    def forward(
        ctx: Any, call: LayerCall, inputs: Tensor, h: Tensor | None, c: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        result, rows, outputs = _forward(call, True, inputs, h, c, weights)
        # Inputs that were cast are kept as they were multiplied, which takes fewer bytes.
        cast = call.dtype != inputs.dtype and call.lengths is None
        ctx.call, ctx.shape, ctx.dtype = call, inputs.shape, inputs.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            None if cast else inputs, rows if cast else None, outputs, result.cells, result.sums, call.lengths, h, c,
            *weights,
        )  # fmt: skip
        ctx.call = call._replace(lengths=None)
        return outputs, result.last_h, result.last_c

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return _backward(ctx, *incoming)
        with torch.no_grad():
            gradients = _backward(ctx, *incoming)
        return no_second_derivative(gradients)


def no_second_derivative(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns gradients of which no further gradient can be asked: that is an error, and not a wrong result."""
    error: Any = torch._C._functions.DelayedError(b"an LSTM layer has no second derivative", len(gradients))
    leaves = [None if part is None else part.detach().requires_grad_() for part in gradients]
    found: tuple[Any, ...] = error(*leaves)
    return found


def _backward(
    ctx: Any, doutputs: Tensor | None, last_h: Tensor | None, last_c: Tensor | None
) -> tuple[Any, ...]:
    """Returns the gradients of all arguments of `_LayerFunction.forward`."""
    inputs, rows, outputs, cells, sums, lengths, h, c, *weights = ctx.saved_tensors
    call = ctx.call._replace(lengths=lengths)
    if doutputs is None and last_h is None and last_c is None:
        return (None,) * (4 + len(weights))
    batch, steps, size = ctx.shape
    if inputs is None:
        # Its values are those of the rows; the type, which the gradient has too, is that before the cast.
        inputs = outputs.new_empty(1, dtype=ctx.dtype).expand(steps, batch, size)
    else:
        inputs = inputs.transpose(0, 1)
    layer = _layer(call, inputs, (h, c), weights)
    # The last states are nothing to the backward pass.
    result = Walked(outputs.transpose(0, 1), outputs, outputs, cells, sums)
    incoming = {
        "outputs": None if doutputs is None else doutputs.transpose(0, 1),
        "last_h": last_h,
        "last_c": last_c,
    }
    needs = ctx.needs_input_grad
    with plain_products(outputs.device.type, call):
        found = run_backward(
            layer, result, incoming, call.dtype, rows, needs[1], any(needs[4:]), call.partitions[1]
        )
    dinputs = found["inputs"]
    gradients: list[Tensor | None] = []
    for parts in zip(found["weights"], found["recurrents"], found["biases"], strict=True):
        gradients += [*parts, *([parts[2]] if call.biases > 1 else [])]
    return (
        None,
        None if dinputs is None else dinputs.transpose(0, 1),
        None if h is None else torch.stack(list(found["first_h"])).to(h.dtype),
        None if c is None else torch.stack(list(found["first_c"])).to(c.dtype),
        *(gradients or [None] * len(weights)),
    )


def run_layer(
    call: LayerCall, inputs: Tensor, h: Tensor | None, c: Tensor | None, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer in one or both directions, recorded by autograd.

    Args:
        call: what is not differentiable.
        inputs: (B, T, I), of any floating point type; cast to the compute type.
        h, c: the first state, (D, B, H) each, in any floating point type; None: zeros.
        weights: of each direction the input weights (4H, I), the recurrent weights (4H, H) and its biases (4H,).

    Returns:
        Outputs (B, T, D H), and h and c after each row's last step, (D, B, H); c is float32.
    """
    # The kernels that read weights expect their last axis to be contiguous.
    weights = [part if part.is_contiguous() else part.contiguous() for part in weights]
    if torch.is_grad_enabled() and any(
        part.requires_grad for part in (inputs, h, c, *weights) if part is not None
    ):
        made: tuple[Tensor, Tensor, Tensor] = _LayerFunction.apply(  # type: ignore[no-untyped-call]
            call, inputs, h, c, *weights
        )
        return made
    result, _, outputs = _forward(call, False, inputs, h, c, weights)
    return outputs, result.last_h, result.last_c
