"""NAdam, RAdam, Adagrad, Adadelta, RMSprop and Adafactor: optimizers for which torch has no fused kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from econmt_ops.loss_scale import unchanged_by_overflow
from econmt_ops.optimizer import FusedOptimizer
from econmt_ops.optimizer_updates import Update

_NADAM_DECAY = 4e-3
"""Rate at which NAdam's momentum approaches its full value: psi of Dozat (2016), as in `torch.optim.NAdam`."""


class PlainOptimizer(FusedOptimizer):
    """NAdam, RAdam, Adagrad, Adadelta, RMSprop or Adafactor, with the results of `torch.optim` for the same settings.

    Dozat (2016); Liu et al. (2020); Duchi, Hazan and Singer (2011); Zeiler (2012); Tieleman and Hinton (2012); Shazeer
    and Stern (2018). An update takes several passes over a parameter where a fused kernel takes one. Sparse gradients
    and CUDA graphs work as in :class:`FusedOptimizer`, except that Adafactor makes sparse gradients dense, because it
    averages over whole rows and columns.

    Args: as in :class:`FusedOptimizer`, with these meanings:
        betas: Decays of nadam and radam; the second is also the decay of rmsprop's and adadelta's squares. Adagrad has
            no decay; Adafactor's is 1 - step ** -0.8.
        eps: Term added to the root of the mean square; for adafactor the smallest root (the root of its epsilon 1).
        weight_decay: L2 penalty; for adafactor decoupled.
        momentum: Momentum of rmsprop.
    """

    names = ("nadam", "radam", "adagrad", "adadelta", "rmsprop", "adafactor")

    def moments(self, parameter: Tensor) -> dict[str, torch.Size]:
        """Returns the shapes of the state; for a matrix Adafactor keeps one mean per row and per column."""
        shape = parameter.shape
        if self._name == "adafactor" and parameter.dim() > 1:
            columns = (*shape[:-2], 1, shape[-1])
            return {"row_var": torch.Size([*shape[:-1], 1]), "col_var": torch.Size(columns)}
        names = {
            "adagrad": ("sum",),
            "adadelta": ("square_avg", "acc_delta"),
            "rmsprop": ("square_avg", *(("momentum_buffer",) if self._momentum else ())),
            "adafactor": ("variance",),
        }
        return dict.fromkeys(names.get(self._name, ("exp_avg", "exp_avg_sq")), shape)

    def _first_numbers(self, parameter: Tensor) -> dict[str, Tensor]:
        numbers = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        if self._name == "nadam":
            numbers["mu_product"] = torch.ones((), dtype=torch.float32, device=parameter.device)
        return numbers

    def _advance(self, numbers: list[dict[str, Tensor]]) -> None:
        super()._advance(numbers)
        if self._name == "nadam":
            for scalars in numbers:
                momentum = self._nadam_momentum(scalars["step"])
                if self._overflow is not None:
                    momentum = momentum.where(self._overflow == 0.0, 1.0)
                scalars["mu_product"].mul_(momentum)

    def _updates(self, parameters: Iterable[Tensor]) -> tuple[list[Update], list[tuple[Update, Tensor]]]:
        if self._name == "adafactor":
            self.make_dense()
        return super()._updates(parameters)

    def _run(self, updates: list[Update], divisor: Tensor | None) -> None:
        rule = getattr(self, f"_{self._name}")
        for update in updates:
            gradient = update.gradient
            if divisor is not None:
                gradient.div_(divisor)
            if self._weight_decay and self._name != "adafactor":
                gradient = gradient.add(update.values, alpha=self._weight_decay)
            with unchanged_by_overflow(self._overflow, update.values, *update.moments):
                rule(update._replace(gradient=gradient))

    @property
    def _rate(self) -> float | Tensor:
        rate: float | Tensor = self.param_groups[0]["lr"]
        return rate

    def _nadam_momentum(self, step: Tensor) -> Tensor:
        return self._betas[0] * (1.0 - 0.5 * 0.96 ** (step.double() * _NADAM_DECAY))

    def _update_moments(self, update: Update) -> tuple[Tensor, Tensor]:
        """Updates Adam's moments with the gradient."""
        first, second = update.moments
        first.lerp_(update.gradient, 1.0 - self._betas[0])
        second.mul_(self._betas[1]).addcmul_(update.gradient, update.gradient, value=1.0 - self._betas[1])
        return first, second

    def _nadam(self, update: Update) -> None:
        first, second = self._update_moments(update)
        step, product = update.numbers["step"], update.numbers["mu_product"].double()
        now, then = self._nadam_momentum(step), self._nadam_momentum(step + 1.0)
        root = (second / (1.0 - self._betas[1] ** step.double())).sqrt_().add_(self._eps)
        change = update.gradient * (self._rate * (1.0 - now) / (1.0 - product))
        change += first * (self._rate * then / (1.0 - product * then))
        update.values.sub_(change.div_(root))

    def _radam(self, update: Update) -> None:
        first, second = self._update_moments(update)
        step = update.numbers["step"].double()
        power = self._betas[1] ** step
        limit = 2.0 / (1.0 - self._betas[1]) - 1.0
        length = limit - 2.0 * step * power / (1.0 - power)
        spread = (length - 4.0) * (length - 2.0) * limit / ((limit - 4.0) * (limit - 2.0) * length)
        # As long as the variance of the second moment is unbounded, the update is the first moment alone.
        known = length > 5.0
        factor = torch.where(known, spread.clamp(min=0.0).sqrt() * (1.0 - power).sqrt(), 1.0)
        root = torch.where(known, second.sqrt().add_(self._eps), 1.0)
        update.values.sub_(first * (self._rate * factor / (1.0 - self._betas[0] ** step)) / root)

    def _adagrad(self, update: Update) -> None:
        (total,) = update.moments
        total.addcmul_(update.gradient, update.gradient)
        update.values.sub_(update.gradient / total.sqrt().add_(self._eps) * self._rate)

    def _adadelta(self, update: Update) -> None:
        square, moved = update.moments
        share = 1.0 - self._betas[1]
        square.mul_(self._betas[1]).addcmul_(update.gradient, update.gradient, value=share)
        change = (moved + self._eps).div_(square + self._eps).sqrt_().mul_(update.gradient)
        moved.mul_(self._betas[1]).addcmul_(change, change, value=share)
        update.values.sub_(change * self._rate)

    def _rmsprop(self, update: Update) -> None:
        square, *buffers = update.moments
        square.mul_(self._betas[1]).addcmul_(update.gradient, update.gradient, value=1.0 - self._betas[1])
        change = update.gradient / square.sqrt().add_(self._eps)
        if buffers:
            change = buffers[0].mul_(self._momentum).add_(change)
        update.values.sub_(change * self._rate)

    def _adafactor(self, update: Update) -> None:
        values, gradient = update.values, update.gradient
        step = update.numbers["step"].double()
        share = (step**-0.8).to(values.dtype)
        smallest = self._eps**2
        rate = torch.clamp(1.0 / step.sqrt(), max=self._rate)
        scale = torch.clamp(values.norm() / values.numel() ** 0.5, min=1e-3) * rate
        if self._weight_decay:
            values.mul_(1.0 - self._rate * self._weight_decay)
        square = gradient.square()
        if values.dim() > 1:
            rows, columns = update.moments
            rows.lerp_(square.mean(-1, keepdim=True), share)
            columns.lerp_(square.mean(-2, keepdim=True), share)
            # torch bounds this mean by epsilon, not by its square; gradients of an ordinary model are below that bound.
            variance = rows @ columns / rows.mean(-2, keepdim=True).clamp_(min=smallest)
        else:
            variance = update.moments[0].lerp_(square, share).clone()
        change = variance.clamp_(min=smallest).rsqrt_().mul_(gradient)
        # Clip the update's root mean square to 1.
        change *= scale / torch.clamp(change.norm() / change.numel() ** 0.5, min=1.0)
        values.sub_(change)
