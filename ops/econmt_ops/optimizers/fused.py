"""SGD, Adam and AdamW by PyTorch's fused kernels, with gradient clipping and row-sparse gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from econmt_ops.backends.cuda import adam
from econmt_ops.backends.cuda.adam import AdamSettings
from econmt_ops.core.arguments import Update
from econmt_ops.optimizers.loss_scale import LossScale
from econmt_ops.optimizers.stochastic_rounding import round_into, salt_of
from econmt_ops.optimizers.updates import (
    check_clipping,
    check_settings,
    checked_parameters,
    gradient_values,
    norms_of,
)

_NORM_EPSILON = 1e-6
"""Term that `torch.nn.utils.clip_grads_with_norm_` adds to the norm in its denominator."""

UpdateKernel = Callable[..., list[Tensor]]
"""Kernel that does updates, such as `econmt_ops.backends.cuda.adam.run`."""

_SGD = ("sgd", "nag")

BLOCK_BYTES = 2 << 20
"""Bytes of a matrix that are updated at a time where temporary values are needed, to stay in the CPU's cache."""

GPU_BLOCK_BYTES = 16 << 20
"""Bytes of such a part on a GPU, where every part costs launches."""


class FusedOptimizer:
    """SGD, SGD with Nesterov momentum, Adam or AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019).

    Results are those of `torch.optim` with ``fused=True``, by the same kernels, or on a Hopper GPU by
    `econmt_ops.backends.cuda.adam` up to rounding. Constructing those classes imports torch's compiler, which takes
    70 MB and two seconds; this class does not.

    On the CPU the gradient of a matrix may be a sparse tensor (``torch.sparse_coo`` with sparse rows and dense
    columns), such as the gradient of an embedding. All other rows count as zero and are updated from their momentum, as
    with a dense gradient, but no dense gradient is created.

    On a GPU no method waits for the device. `clip`, `step` and `clip_and_step` may be captured in a CUDA graph if
    `prepare` was called before; with a learning rate in a tensor on the device, every replay reads its current value.

    Parameters in bfloat16 have moments in float32; their updates are computed in float32 and rounded stochastically.

    It is no `torch.optim.Optimizer`: `set_learning_rate` replaces schedulers, and `state` the state dict. Copy its
    tensors to save it, and assign such a dict to ``state[parameter]`` of each parameter to restore it.

    Args:
        parameters: Parameters, all on one device.
        name: One of :attr:`names`.
        learning_rate: Learning rate of the first step: a number, or a float32 scalar on the device of the parameters.
        betas: Decay of Adam's first and second moment.
        eps: Adam's epsilon.
        weight_decay: L2 penalty, or decoupled weight decay for adamw.
        momentum: Momentum of sgd and nag.
        owned: Parameters that this process updates and keeps state for, if other processes own the rest; None: all.
        rounding_seed: Seed of the rounding of parameters in bfloat16.

    Attributes:
        names: Names of the supported algorithms.
        whole: Names of those whose update of a matrix cannot be done row by row.
        param_groups: One group with "params" and "lr", as in `torch.optim`.
        state: State of each parameter, under the names of `torch.optim`; empty before the first step.
        loss_scale: Factor that the gradients contain, or None. `clip` and `clip_and_step` then return the norm without
            it, and thresholds refer to gradients without it. A step whose gradients overflow changes no parameter and
            no state, the number of steps included; each step updates the scale.

    Raises:
        ValueError: If the name is unknown, a setting is negative or a decay is not less than 1, or the parameters are
            not leaf tensors, each named once.
    """

    names: tuple[str, ...] = ("sgd", "nag", "adam", "adamw")
    whole: tuple[str, ...] = ()

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
        rounding_seed: int = 0,
    ) -> None:
        if name not in self.names:
            raise ValueError(
                f"{type(self).__name__}: name must be one of {', '.join(self.names)}, got {name!r}"
            )
        rules = {"eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        check_settings(type(self).__name__, betas, {"learning_rate": learning_rate, **rules})
        listed = checked_parameters(type(self).__name__, parameters)
        self.param_groups: list[dict[str, Any]] = [{"params": listed, "lr": learning_rate}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._name = name
        self._betas, self._eps = betas, eps
        self._weight_decay, self._momentum = weight_decay, momentum
        self.loss_scale: LossScale | None = None
        self._divisor: Tensor | None = None
        self._owned = None if owned is None else set(owned)
        self._salts: dict[Tensor, int] = {
            parameter: salt_of(rounding_seed, number) for number, parameter in enumerate(listed)
        }

    def owns(self, parameter: Tensor) -> bool:
        """Returns True if this process updates the parameter."""
        return self._owned is None or parameter in self._owned

    def set_learning_rate(self, rate: float) -> None:
        """Sets the rate of the next step; a tensor is filled in place, so that replays of a graph read it."""
        (group,) = self.param_groups
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    # ------------------------------------------------------------------ gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or fills them with zeros, and drops the clipping divisor of the next step."""
        self._divisor = None
        if self.loss_scale is not None:
            self.loss_scale.overflow = None
        for parameter in self.param_groups[0]["params"]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def make_dense(self) -> None:
        """Replaces sparse gradients by dense ones, to which further gradients are added in place."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def norms(self) -> Tensor:
        """Returns the norm of each parameter's gradient, (P,), 0 where there is none."""
        parameters = self.param_groups[0]["params"]
        each_norm = [
            parameter.new_zeros(())
            if parameter.grad is None
            else torch.linalg.vector_norm(gradient_values(parameter))
            for parameter in parameters
        ]
        return torch.stack(each_norm)

    def clip(self, kind: str, threshold: float, norm: Tensor | None = None) -> Tensor:
        """Clips the gradients of the next step.

        Clipping by norm is deferred: the next step divides the gradients as it reads them, which saves one pass over
        memory; until then they are unchanged. The result is that of `torch.nn.utils.clip_grad_norm_`, up to rounding.

        Args:
            kind: "norm" to clip the norm of all gradients together, "value" to clip each value, or "none".
            threshold: Largest norm or absolute value.
            norm: Norm of all gradients, if other processes hold some of them; None: that of the gradients here.

        Returns:
            The norm of all gradients before clipping, a scalar on their device.

        Raises:
            ValueError: If the kind is unknown.
        """
        check_clipping(type(self).__name__, kind)
        values = [gradient_values(parameter) for parameter in self._with_gradient()]
        if norm is None:
            norm = self.norm_of_parts(norms_of(values))
        bound: Any = threshold
        self._divisor = None
        if self.loss_scale is not None:
            norm = self.loss_scale.unscaled(norm)
            self._divisor = self.loss_scale.scale
            bound = threshold * self.loss_scale.scale
        if kind == "norm":
            divisor = ((norm + _NORM_EPSILON) / threshold).clamp(min=1.0).to(torch.float32)
            if self._divisor is not None:
                self._divisor = self._divisor * divisor
            # On the CPU the comparison is free and may save the division; on a GPU it would wait for the device.
            elif norm.is_cuda or not divisor <= 1.0:
                self._divisor = divisor
        elif kind == "value":
            for gradient in values:  # torch._foreach_* would pass over them twice
                gradient.clamp_(-bound, bound)
        return norm

    def _with_gradient(self) -> list[Tensor]:
        return [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]

    # ------------------------------------------------------------------ steps

    def prepare(self) -> None:
        """Creates the state of all trainable parameters, which the first step would create otherwise."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.requires_grad and self.owns(parameter):
                self._state(parameter)
                if self._is_adam:
                    adam.prepare(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient; dense gradients may hold the clipped values afterwards."""
        if self.loss_scale is not None and self.loss_scale.overflow is None:
            self.clip("none", math.inf)
        divisor, self._divisor = self._divisor, None
        self._apply(self._with_kernels(self._updates(self._with_gradient())), divisor)
        if self.loss_scale is not None:
            self.loss_scale.update()

    @property
    def _overflow(self) -> Tensor | None:
        """1.0 if the current step is skipped, else 0.0, a float32 scalar; None if steps are never skipped."""
        return None if self.loss_scale is None else self.loss_scale.overflow

    @torch.no_grad()
    def clip_and_step(self, kind: str, threshold: float) -> Tensor:
        """Does `clip`, then `step`; where a kernel can do both, it reads the gradients once.

        Returns:
            The norm of all gradients before clipping, a scalar on their device.
        """
        check_clipping(type(self).__name__, kind)
        if kind != "norm" and self.loss_scale is None and self._owned is None:
            return self.norm_of_parts(self.clip_and_step_parts(kind, threshold, self._with_gradient()))
        norm = self.clip(kind, threshold)
        self.step()
        return norm

    @torch.no_grad()
    def clip_and_step_parts(self, kind: str, threshold: float, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Updates parameters that have gradients, clipped by "value" or not ("none"), without a loss scale.

        Returns:
            The gradients' parts of the norm before clipping, in order, for `norm_of_parts`.
        """
        self._divisor = None
        updates = self._updates(parameters)
        pairs = self._with_kernels(updates)
        if len(updates) == len(parameters) and all(kernel for _, kernel in pairs):
            return self._launch(pairs, None, threshold if kind == "value" else math.inf, norm=True)
        values = [gradient_values(parameter) for parameter in parameters]
        parts = norms_of(values)
        for gradient in values if kind == "value" else ():
            gradient.clamp_(-threshold, threshold)
        self._apply(pairs, None)
        return parts

    def norm_of_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the norm of all gradients from their parts, in the order of the parameters."""
        if not parts:
            return torch.zeros(())
        if parts[0].dim():  # sums of squares of a kernel's blocks
            return torch.cat(list(parts)).sum().sqrt()
        norm: Tensor = torch.linalg.vector_norm(torch.stack(list(parts)))
        return norm

    def _updates(self, parameters: Iterable[Tensor]) -> list[Update]:
        """Counts a step; returns the updates of parameters that have gradients."""
        updates = []
        for parameter in filter(self.owns, parameters):
            state, gradient = self._state(parameter), gradient_values(parameter)
            assert parameter.grad is not None
            update = Update(
                parameter,
                gradient,
                tuple(state[name] for name in self.moments(parameter)),
                {name: value for name, value in state.items() if value.dim() == 0},
                self._salts[parameter],
                rows=parameter.grad._indices()[0] if parameter.grad.is_sparse else None,
            )
            updates.append(update)
        self._advance([update.numbers for update in updates])
        # Fused kernels do not tell autograd that they change parameters, which graphs made before may still need.
        torch.autograd.graph.increment_version([update.values for update in updates])
        return updates

    def moments(self, parameter: Tensor) -> dict[str, torch.Size]:
        """Returns the shapes of a parameter's state tensors other than scalars, by name."""
        names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        if self._name in _SGD:
            names = ("momentum_buffer",) if self._momentum else ()
        return dict.fromkeys(names, parameter.shape)

    def moment_type(self, parameter: Tensor, name: str) -> torch.dtype:  # noqa: ARG002  subclasses use it
        """Returns the type of a state tensor named by :meth:`moments`."""
        return torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype

    def moment_bytes(self, parameter: Tensor) -> int:
        """Returns the bytes of all state tensors that :meth:`moments` names."""
        shapes = self.moments(parameter).items()
        return sum(shape.numel() * self.moment_type(parameter, name).itemsize for name, shape in shapes)

    def _first_numbers(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns the scalars of a new state; the number of the step if the algorithm or rounding depends on it."""
        if self._name in _SGD and parameter.dtype != torch.bfloat16:
            return {}
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}

    def _advance(self, numbers: list[dict[str, Tensor]]) -> None:
        """Counts one step in the scalars of all parameters that are updated."""
        steps = [scalars["step"] for scalars in numbers if "step" in scalars]
        if steps:
            torch._foreach_add_(steps, 1)
        if steps and self._overflow is not None:
            torch._foreach_sub_(steps, [self._overflow] * len(steps))

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns the state of a parameter and creates the parts that are missing."""
        shapes, tensors = self.moments(parameter), self.state.get(parameter, {})
        if shapes.keys() - tensors.keys() or (parameter.dtype == torch.bfloat16 and "step" not in tensors):
            if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "FusedOptimizer: state cannot be created while a CUDA graph is captured; call prepare() before"
                )
            # A momentum buffer of zeros has the effect of SGD's first step, which copies the gradient to it.
            moments = {
                name: parameter.detach().new_zeros(shape, dtype=self.moment_type(parameter, name))
                for name, shape in shapes.items()
            }
            tensors = {**self._first_numbers(parameter), **moments, **tensors}
            self.state[parameter] = tensors
        return tensors

    def _apply(self, updates: Iterable[tuple[Update, UpdateKernel | None]], divisor: Tensor | None) -> None:
        """Does updates, at once those that need not be divided or converted."""
        ready = []
        for update, kernel in updates:
            parts = self._parts(update, kernel)
            if parts is None:
                ready.append((update, kernel))
            for part in parts or ():
                self._apply(self._with_kernels([part]), divisor)
        self._launch(ready, divisor)

    def _parts(self, update: Update, kernel: UpdateKernel | None) -> Iterator[Update] | None:
        """Yields updates that do a given one and, after each, writes its results back; None if it can run itself."""
        if update.rows is not None:
            return self._dense_parts(update, update.rows)
        tensors = update.values, update.gradient, *update.moments
        copies = [self._for_kernels(part) for part in tensors]
        if any(copy is not part for copy, part in zip(copies, tensors, strict=True)):
            return self._copy(update, *copies)
        if update.values.dtype == torch.bfloat16 and kernel is None:
            return self._float32_parts(update)
        return None

    def _dense_parts(self, update: Update, rows: Tensor) -> Iterator[Update]:
        """Divides the update of a matrix whose gradient is zero except in some rows, in ascending order."""
        matrix = update.values
        size = max(1, BLOCK_BYTES // (matrix[0].numel() * matrix.element_size()))
        blocks = list(zip(*(torch.split(part, size) for part in (matrix, *update.moments)), strict=True))
        counts = torch.bincount(rows // size, minlength=len(blocks)).tolist()
        block_rows, values = torch.split(rows % size, counts), torch.split(update.gradient, counts)
        buffer = torch.zeros_like(matrix[:size])
        begin = 0
        for (block, *moments), indices, block_gradient in zip(blocks, block_rows, values, strict=True):
            gradient = buffer[: len(block)].index_copy_(0, indices, block_gradient)
            yield Update(block, gradient, tuple(moments), update.numbers, update.salt, begin)
            gradient.index_fill_(0, indices, 0.0)
            begin += block.numel()

    def _copy(self, update: Update, values: Tensor, gradient: Tensor, *moments: Tensor) -> Iterator[Update]:
        """Replaces tensors that kernels cannot read by copies."""
        yield update._replace(values=values, gradient=gradient, moments=moments)
        for tensor, copy in zip((update.values, *update.moments), (values, *moments), strict=True):
            tensor.copy_(copy)

    def _float32_parts(self, update: Update) -> Iterator[Update]:
        """Divides the update of a parameter in bfloat16, whose results are rounded stochastically."""
        tensors = update.values, update.gradient, *update.moments
        views = [part.view(1) if part.dim() == 0 else part for part in tensors]
        rows, begin = len(views[0]), update.begin
        if self._name not in self.whole:
            size = GPU_BLOCK_BYTES if update.values.is_cuda else BLOCK_BYTES
            rows = min(rows, size * rows // (4 * update.values.numel() or 1))
        parts = (torch.split(part, max(1, rows)) for part in views)
        for values, gradient, *moments in zip(*parts, strict=True):
            exact = values.float()
            yield update._replace(values=exact, gradient=gradient.float(), moments=tuple(moments))
            round_into(values, exact, update.numbers["step"], update.salt, begin)
            begin += values.numel()

    def _for_kernels(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of an update as kernels can read it: itself, or a copy."""
        if tensor.dtype == torch.float16 and self._name in _SGD and not tensor.is_cuda:
            tensor = tensor.float()  # torch._fused_sgd_ leaves most float16 values on a CPU as they are
        # Kernels walk through memory, so that all tensors need the same order of values.
        return tensor.contiguous()

    def _with_kernels(self, updates: Iterable[Update]) -> list[tuple[Update, UpdateKernel | None]]:
        return [(update, self._kernel_of(update)) for update in updates]

    def _kernel_of(self, update: Update) -> UpdateKernel | None:
        """Returns the kernel that does an update, and rounds parameters in bfloat16 itself; None if there is none."""
        fits = self._is_adam and update.rows is None
        return adam.run if fits and adam.serves(update.values, update.gradient, *update.moments) else None

    def _launch(
        self,
        updates: Sequence[tuple[Update, UpdateKernel | None]],
        divisor: Tensor | None,
        bound: float = math.inf,
        *,
        norm: bool = False,
    ) -> list[Tensor]:
        """Does updates by the kernels that they have, clipped to ``bound``; all others by :meth:`_run`.

        Returns:
            With ``norm``, the sums of squares of each gradient's blocks, in order; otherwise nothing.
        """
        launches: dict[Any, list[int]] = {}
        for number, (update, kernel) in enumerate(updates):
            launches.setdefault(kernel and (kernel, update.values.dtype), []).append(number)
        rate = self.param_groups[0]["lr"]
        if any(launches) and not isinstance(rate, Tensor):
            rate = torch.full((), rate, dtype=torch.float32, device=updates[0][0].values.device)
        rules = self._betas, self._eps, self._weight_decay, self._name == "adamw"
        settings = AdamSettings(*rules, rate, divisor, bound, self._overflow)
        squares: dict[int, Tensor] = {}
        for launch, numbers in launches.items():
            together = [updates[number][0] for number in numbers]
            if launch is None:
                self._run(together, divisor)
            else:
                squares.update(zip(numbers, launch[0](settings, together, norm=norm), strict=norm))
        return [squares[number] for number in sorted(squares)]

    def _run(self, updates: list[Update], divisor: Tensor | None) -> None:
        values, gradients = [part.values for part in updates], [part.gradient for part in updates]
        moments = [list(parts) for parts in zip(*(part.moments for part in updates), strict=True)]
        how: dict[str, Any] = {"lr": self.param_groups[0]["lr"], "weight_decay": self._weight_decay}
        how |= {"maximize": False, "grad_scale": divisor, "found_inf": self._overflow}
        if self._name in _SGD:
            how |= {"momentum": self._momentum, "dampening": 0.0, "nesterov": self._name == "nag"}
            buffers = moments[0] if moments else []
            torch._fused_sgd_(values, gradients, buffers, is_first_step=False, **how)
            return
        how |= {"beta1": self._betas[0], "beta2": self._betas[1], "eps": self._eps, "amsgrad": False}
        algorithm: Any = torch._fused_adam_ if self._name == "adam" else torch._fused_adamw_
        algorithm(values, gradients, *moments, [], [part.numbers["step"] for part in updates], **how)

    @property
    def _is_adam(self) -> bool:
        return self._name in ("adam", "adamw")
