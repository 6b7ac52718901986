"""SGD, Adam and AdamW, each value read and written once, whatever the gradient: bounded, or of some rows only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_NORM_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grads_with_norm_` adds to a norm before it divides by it."""

_SGD = ("sgd", "nag")

BLOCK_BYTES = 2 << 20
"""What an update makes of a gradient or of moments it makes of so many bytes at a time, which stay in the cache."""


class Update(NamedTuple):
    """One entry of a kernel's lists: values, their gradient, their moments, and the numbers of the state."""

    values: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    numbers: dict[str, Tensor]


class FusedOptimizer:
    """SGD, with Nesterov's momentum too, Adam or AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019).

    What `torch.optim` gives with ``fused=True``, by the same kernels. Those classes import torch's compiler when they
    are made, which takes 70 MB and two seconds that a training run can do without.

    On the CPU the gradient of a matrix may be a sparse tensor (``torch.sparse_coo``, its rows sparse, its columns
    dense), such as a look-up gives. It counts as zero in all other rows, which go on with their momentum as with a
    dense gradient; but no dense one is made.

    On a GPU nothing here waits for the device, and `clip` and `step` may be captured in a CUDA graph: with a learning
    rate that is a tensor there, which every replay reads anew, and once `prepare` has made the state.

    Args:
        parameters: all on one device.
        name: one of :attr:`names`.
        learning_rate: of the first step: a number, or a float32 scalar on the device of the parameters.
        betas: decay of Adam's first and second moment.
        eps: Adam's epsilon.
        weight_decay: L2 penalty, or decoupled weight decay (adamw).
        momentum: of sgd and nag.
        owned: the parameters that it updates, and whose state it has, where other processes have the others; None: all.

    Attributes:
        names: of the algorithms that it knows.
        param_groups: one, with "params" and "lr", as `torch.optim` has them.
        state: of each parameter, under the names that `torch.optim` gives; empty before the first step.
    """

    names: tuple[str, ...] = ("sgd", "nag", "adam", "adamw")

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        name: str,
        learning_rate: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        owned: Iterable[nn.Parameter] | None = None,
    ) -> None:
        if name not in self.names:
            raise ValueError(f"{type(self).__name__}: name must be of {', '.join(self.names)}, got {name!r}")
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": learning_rate}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._name = name
        self._betas, self._eps = betas, eps
        self._weight_decay, self._momentum = weight_decay, momentum
        self._divisor: Tensor | None = None
        self._owned = None if owned is None else set(owned)

    def owns(self, parameter: Tensor) -> bool:
        """Whether a parameter is updated here."""
        return self._owned is None or parameter in self._owned

    def set_learning_rate(self, rate: float) -> None:
        """Sets the rate of the next step; a rate in a tensor changes in place, so that replays read it."""
        (group,) = self.param_groups
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    # ------------------------------------------------------------------ gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients and what the next step would divide them by, or fills them with zeros."""
        self._divisor = None
        for parameter in self.param_groups[0]["params"]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def make_dense(self) -> None:
        """Makes sparse gradients dense: others are added to these in place, and to sparse ones by a new tensor."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def norms(self) -> Tensor:
        """The norm of each parameter's gradient, 0 where there is none: (P,) in order of the parameters."""
        parameters = self.param_groups[0]["params"]
        found = [
            parameter.new_zeros(())
            if parameter.grad is None
            else torch.linalg.vector_norm(_values(parameter))
            for parameter in parameters
        ]
        return torch.stack(found)

    def clip(self, kind: str, threshold: float, norm: Tensor | None = None) -> Tensor:
        """Bounds the gradients of the next step.

        A norm is bounded by that step, which divides the gradients as it reads them, so that they are not read and
        written once more; until then they stay as they are. Up to rounding that is `torch.nn.utils.clip_grad_norm_`.

        Args:
            kind: "norm" of all gradients together, each "value", or "none".
            threshold: the largest norm or value.
            norm: of all gradients together, where others have some of them; None: of those that are here.

        Returns:
            The norm of all gradients together before clipping, a scalar on their device.
        """
        values = [_values(parameter) for parameter in self._with_gradient()]
        if norm is None:
            norm = torch.nn.utils.get_total_norm(values)
        self._divisor = None
        if kind == "norm":
            divisor = ((norm + _NORM_EPSILON) / threshold).clamp(min=1.0).to(torch.float32)
            # To look whether there is anything to divide costs nothing on the CPU; a GPU would have to be waited for.
            if norm.is_cuda or not divisor <= 1.0:
                self._divisor = divisor
        elif kind == "value":
            torch._foreach_clamp_min_(values, -threshold)
            torch._foreach_clamp_max_(values, threshold)
        return norm

    def _with_gradient(self) -> list[Tensor]:
        return [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]

    # ------------------------------------------------------------------ steps

    def prepare(self) -> None:
        """Makes the state of every parameter that a gradient may come for, which the first step would make."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.requires_grad and self.owns(parameter):
                self._state(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient; dense ones hold the bounded gradient afterwards."""
        divisor, self._divisor = self._divisor, None
        dense, sparse = [], []
        for parameter in filter(self.owns, self._with_gradient()):
            state = self._state(parameter)
            update = Update(
                parameter,
                _values(parameter),
                tuple(state[name] for name in self.moments(parameter)),
                {name: value for name, value in state.items() if value.dim() == 0},
            )
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                sparse.append((update, parameter.grad._indices()[0]))
            else:
                dense.append(update)
        self._advance([update.numbers for update in (*dense, *(part for part, _ in sparse))])
        if dense:
            self._run(dense, divisor)
        for update, rows in sparse:
            self._run_in_blocks(update, rows, divisor)

    def moments(self, parameter: Tensor) -> dict[str, torch.Size]:
        """The shapes of what the state of a parameter has beside numbers, by name."""
        names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        if self._name in _SGD:
            names = ("momentum_buffer",) if self._momentum else ()
        return dict.fromkeys(names, parameter.shape)

    def moment_type(self, parameter: Tensor, name: str) -> torch.dtype:  # noqa: ARG002  all alike here
        """The type of what :meth:`moments` names."""
        return parameter.dtype

    def moment_bytes(self, parameter: Tensor) -> int:
        """Bytes of all that :meth:`moments` names."""
        shapes = self.moments(parameter).items()
        return sum(shape.numel() * self.moment_type(parameter, name).itemsize for name, shape in shapes)

    def _first_numbers(self, device: torch.device) -> dict[str, Tensor]:
        """The numbers of a new state."""
        if self._name in _SGD:
            return {}
        return {"step": torch.zeros((), dtype=torch.float32, device=device)}

    def _advance(self, numbers: list[dict[str, Tensor]]) -> None:
        """Counts a step in the numbers of all parameters that take part in it."""
        steps = [own["step"] for own in numbers if "step" in own]
        if steps:
            torch._foreach_add_(steps, 1)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter; what of it is not there yet is made."""
        shapes, there = self.moments(parameter), self.state.get(parameter, {})
        if shapes.keys() - there.keys():
            if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "FusedOptimizer: each replay of a graph would make new state; call prepare() before"
                )
            # SGD's first step sets a buffer to its gradient, which adding to zeros does too.
            moments = {
                name: parameter.detach().new_zeros(shape, dtype=self.moment_type(parameter, name))
                for name, shape in shapes.items()
            }
            there = {**self._first_numbers(parameter.device), **moments, **there}
            self.state[parameter] = there
        return there

    def _run_in_blocks(self, update: Update, rows: Tensor, divisor: Tensor | None) -> None:
        """An update of a whole matrix whose gradient has these rows only, in order."""
        matrix = update.values
        size = max(1, BLOCK_BYTES // (matrix[0].numel() * matrix.element_size()))
        blocks = list(zip(*(torch.split(part, size) for part in (matrix, *update.moments)), strict=True))
        counts = torch.bincount(rows // size, minlength=len(blocks)).tolist()
        places, values = torch.split(rows % size, counts), torch.split(update.gradient, counts)
        buffer = torch.zeros_like(matrix[:size])
        for (block, *moments), own, found in zip(blocks, places, values, strict=True):
            gradient = buffer[: len(block)].index_copy_(0, own, found)
            self._run([Update(block, gradient, tuple(moments), update.numbers)], divisor)
            gradient.index_fill_(0, own, 0.0)

    def _run(self, updates: list[Update], divisor: Tensor | None) -> None:
        values, gradients = [part.values for part in updates], [part.gradient for part in updates]
        moments = [list(parts) for parts in zip(*(part.moments for part in updates), strict=True)]
        rate: float | Tensor = self.param_groups[0]["lr"]
        if self._name in _SGD:
            torch._fused_sgd_(
                values,
                gradients,
                moments[0] if moments else [],
                lr=rate,
                weight_decay=self._weight_decay,
                momentum=self._momentum,
                dampening=0.0,
                nesterov=self._name == "nag",
                maximize=False,
                is_first_step=False,
                grad_scale=divisor,
            )
            return
        algorithm = torch._fused_adam_ if self._name == "adam" else torch._fused_adamw_
        algorithm(
            values,
            gradients,
            moments[0],
            moments[1],
            [],
            [part.numbers["step"] for part in updates],
            lr=rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=self._weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )


def _values(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, or its rows if it is sparse, which are distinct and in order afterwards."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    rows = gradient._indices()[0]
    # Autograd forgets to say of what it adds up that it is coalesced, and to coalesce it again takes a copy.
    if not bool((rows[1:] > rows[:-1]).all()):
        parameter.grad = gradient = gradient.coalesce()
    return gradient._values()
