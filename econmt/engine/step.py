"""The training step, which training, memory measurement, planning and benchmarks all use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from econmt.config.conditions import PROCESSES, conflicts
from econmt.config.recipe import Recipe
from econmt.config.training import Training
from econmt.config.yaml_reader import leaves
from econmt.data.batching.batch import AnyBatch
from econmt.engine.communicator import Communicator
from econmt.engine.optimizers import load_optimizer_tensors, make_optimizer, optimizer_tensors
from econmt.engine.parameters import ParameterAverage, prepare_parameters
from econmt.engine.precision import Precision
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.model.layers import drawing_from, give_sparse_gradients
from econmt.tasks.protocol import Task
from econmt_ops.optimizers.fused import FusedOptimizer
from econmt_ops.optimizers.in_backward import BackwardUpdates
from econmt_ops.optimizers.loss_scale import LossScale
from econmt_ops.products.dropout import SeedCounter

OnPhase = Callable[[str, Tensor | None], object]
"""Called with the phase that begins: "forward", "backward" (with the differentiated loss) or "optimizer"."""


def _nothing(_phase: str, _loss: Tensor | None) -> None:
    """Ignores the phases of a step."""


class StepResult(NamedTuple):
    """Results of an update, as scalars on the device.

    Attributes:
        loss: Loss in nats, summed over all target tokens.
        norm: Norm of the gradient of the loss per token, before clipping; not finite if the gradient overflows, with
            which a step in float16 changes no parameter.
        loss_scale: Factor of the loss in this step; None if there is none, in all precisions but float16.
    """

    loss: Tensor
    norm: Tensor
    loss_scale: Tensor | None = None


class OtherRankError(RuntimeError):
    """Raised where this rank's gradients are dropped because another rank could not compute a batch."""

    def __init__(self, number: int) -> None:
        super().__init__(f"another rank could not compute batch {number}")
        self.number = number


def updates_in_backward(
    training: Training, precision: Precision, processes: int, device: torch.device
) -> bool:
    """Returns True if updates from one batch are made during the backward pass on a type of device."""
    in_graphs = device.type == "cuda" and training.in_graphs and training.update_interval == 1
    needs_all = training.gradient_clipping.type == "norm"
    if needs_all or processes > 1 or precision.dtype == torch.float16:
        return False
    return training.optimizer_in_backward == "always" or (
        training.optimizer_in_backward == "auto" and in_graphs
    )


def check_settings(recipe: Recipe, precision: Precision, processes: int) -> None:
    """Checks that settings can be combined, those of a run with its precision and processes among them.

    Raises:
        InputError: if two of them cannot.
    """
    facts = {"training.precision": precision.name, PROCESSES: processes}
    for problem in conflicts({**dict(leaves(recipe)), **facts}):
        raise InputError(problem)


class TrainingStep:
    """Training step: zero gradients, forward and backward pass of every batch, all-reduce, clipping, update.

    :meth:`run` never reads the value of a GPU tensor on the host and depends on tensors, shapes and the settings below
    only, so that it can be captured in a CUDA graph for each shape. On a CPU the optimizer checks whether there is
    anything to clip, and embeddings get sparse gradients, whose rows an update reads.

    Args:
        model: Model of the task, on the device.
        precision: Precision of products and feature maps.
        implementations: Implementations of the ops; None: those of the recipe.
        optimizer: Optimizer of the model's parameters; None: a new one from the recipe.
        communicator: Communicator of the processes that train together.
        target_device: Device type that fake tensors represent; None: the model's device.

    Attributes:
        overlaps: True if gradients are sent to other ranks during the backward pass; otherwise after it, so that a
            backward pass that fails has sent nothing.
        keeps_gradients: True if gradients are filled with zeros between steps instead of freed, which keeps their
            addresses.
        seconds: Seconds spent computing gradients, without waiting for other ranks; on a GPU, seconds spent launching
            kernels.
        number: Number of the batch whose gradient is being computed; after an error, of the batch that failed.
        backward_updates: Updates of an update's only batch during its backward pass; None: all are made after it.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        precision: Precision | None = None,
        *,
        implementations: Implementations | None = None,
        optimizer: FusedOptimizer | None = None,
        communicator: Communicator | None = None,
        target_device: str | None = None,
    ) -> None:
        training = task.recipe.training
        self.task = task
        self.model = model
        self.device = next(model.parameters()).device
        self.precision = Precision() if precision is None else precision
        self.implementations = implementations or Implementations.of(task.recipe.ops)
        self.communicator = Communicator() if communicator is None else communicator
        check_settings(task.recipe, self.precision, self.communicator.size)
        self.clipping = training.gradient_clipping
        self.label_smoothing = training.label_smoothing
        prepare_parameters(model, training)
        self.shares = self.communicator.shares(model.parameters())
        if optimizer is None:
            owned = None if self.shares is None else self.shares.owned
            optimizer = make_optimizer(
                dict(model.named_parameters()), training.optimizer, owned, training.seed
            )
        self.optimizer = optimizer
        self.keeps_gradients = False
        self.overlaps = True
        self._reduction = self.communicator.reduction(self.parameters)
        self.number: int | None = None
        self.seconds = 0.0
        self._target = self.device if target_device is None else torch.device(target_device)
        in_backward = updates_in_backward(training, self.precision, self.communicator.size, self._target)
        if self.precision.dtype == torch.float16:
            optimizer.loss_scale = LossScale(self.device, training.loss_scale, training.loss_scale_window)
        self.seeds: SeedCounter | None = None
        if self.device.type == "cuda":
            self.seeds = SeedCounter(training.seed, self.device)
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=self.device)
        self.backward_updates: BackwardUpdates | None = None
        if in_backward:
            self.backward_updates = BackwardUpdates(optimizer, self.clipping.type, self.clipping.threshold)
        self._applied = False
        if self._target.type == "cpu":
            give_sparse_gradients(model)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters for which a step computes gradients in this process."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields these parameters by name; a slice of a parameter has the name of the whole parameter."""
        yield from self.model.named_parameters()

    def __call__(self, batches: Sequence[AnyBatch]) -> StepResult:
        """Updates the parameters from batches that may still be on the CPU; see :meth:`run`."""
        return self.run([batch.to(self.device) for batch in batches], self.tokens(batches))

    def tokens(self, batches: Sequence[AnyBatch], number: int | None = None) -> Tensor:
        """Returns the number of target tokens of batches, or ``number`` if given, as an int64 scalar on the device."""
        tokens = torch.tensor(sum(batch.target_tokens for batch in batches) if number is None else number)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens

    def run(
        self,
        batches: Sequence[AnyBatch],
        tokens: Tensor,
        implementations: Sequence[Implementations] | None = None,
        on_phase: OnPhase = _nothing,
    ) -> StepResult:
        """Updates the parameters once; see :meth:`gradient`."""
        if not self._updates_in_backward(batches):
            return self.finish_and_update(self._total_loss(batches, tokens, implementations, on_phase))
        result = self.gradient(batches, tokens, implementations, on_phase, applies=True)
        self.update()
        return result

    @property
    def is_partly_updated(self) -> bool:
        """True if a step failed after it had updated some parameters, so that it cannot be repeated."""
        return self.backward_updates is not None and self.backward_updates.started

    def _updates_in_backward(self, batches: Sequence[AnyBatch]) -> bool:
        """Returns True if an update from these batches is made during the backward pass."""
        return self.backward_updates is not None and len(batches) == 1 and not self.keeps_gradients

    def gradient(
        self,
        batches: Sequence[AnyBatch],
        tokens: Tensor,
        implementations: Sequence[Implementations] | None = None,
        on_phase: OnPhase = _nothing,
        *,
        adds: bool = False,
        applies: bool = False,
    ) -> StepResult:
        """Computes the gradient of the loss per token, times the loss scale, which :meth:`update` clips and applies.

        Args:
            batches: Batches on the device, whose gradients are added up.
            tokens: Divisor of the sum of the losses, an int64 scalar on the device.
            implementations: Implementations of the ops for each batch; None: those of the step.
            adds: True to add to the existing gradients.
            applies: True if :meth:`update` follows in any case, so that it can be made during the backward pass, which
                sets gradients to None; see :attr:`backward_updates`.
        """
        updates = self.backward_updates
        if applies and updates is not None and self._updates_in_backward(batches):
            with updates.running():
                loss = self._total_loss(batches, tokens, implementations, on_phase, adds=adds)
            self._applied = True
            return StepResult(loss, updates.finish())
        return self.finish(self._total_loss(batches, tokens, implementations, on_phase, adds=adds))

    def _total_loss(
        self,
        batches: Sequence[AnyBatch],
        tokens: Tensor,
        implementations: Sequence[Implementations] | None,
        on_phase: OnPhase,
        *,
        adds: bool = False,
    ) -> Tensor:
        """Computes the gradients of :meth:`gradient` and returns the summed loss."""
        if not adds:
            self.clear()
        chosen = implementations or [self.implementations] * len(batches)
        began = time.monotonic()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            self.number = number
            if self._reduction is not None and self.overlaps and number == len(batches) - 1:
                self._reduction.begin()
            total = total + self.accumulate(batch, tokens, chosen[number], on_phase)
        self.number = None
        self.seconds += time.monotonic() - began
        if self._reduction is not None and not self.overlaps:
            self._reduction.pack()
        self.agree()
        on_phase("optimizer", None)
        return total

    def accumulate(
        self, batch: AnyBatch, tokens: Tensor, implementations: Implementations, on_phase: OnPhase = _nothing
    ) -> Tensor:
        """Adds the gradient of a batch on the device to the existing gradients; ``tokens`` divide its loss.

        Returns:
            The summed loss of the batch, a scalar on the device.
        """
        self.optimizer.make_dense()  # so that this batch's gradients are added in place
        if self.seeds is not None:
            self.seeds.advance()
        on_phase("forward", None)
        first_row = self.communicator.replica * len(batch.indices)
        with self.precision.products(self._target), drawing_from(self.seeds, first_row):
            return self.compute(batch, tokens, implementations, on_phase)

    def compute(
        self, batch: AnyBatch, tokens: Tensor, implementations: Implementations, on_phase: OnPhase
    ) -> Tensor:
        """Runs the forward and backward pass of a batch; see :meth:`accumulate`."""
        with self.precision.autocast(self.device):
            loss = self.task.loss(self.model, batch, implementations, self.label_smoothing)
        mean = self.scaled(loss / tokens)
        on_phase("backward", mean)
        torch.autograd.backward(mean)
        return loss.detach()

    @property
    def loss_scale(self) -> LossScale | None:
        """Dynamic factor of the loss in float16; None in other precisions."""
        return self.optimizer.loss_scale

    def scaled(self, value: Tensor) -> Tensor:
        """Multiplies a value by the loss scale, if there is one."""
        return value if self.loss_scale is None else value * self.loss_scale.scale

    def scale_in_use(self) -> Tensor | None:
        """Returns a copy of the loss scale, which the update overwrites; None if there is none."""
        return None if self.loss_scale is None else self.loss_scale.scale.clone()

    def agree(self, failed: int | None = None) -> int:
        """Checks with the other ranks that all have computed their batches, unless gradients are already being sent.

        Args:
            failed: Number of the batch that this rank could not compute; None if it computed all.

        Returns:
            The number of the last batch that some rank could not compute.

        Raises:
            OtherRankError: This rank computed all batches, but another rank did not.
        """
        if self.communicator.size == 1 or self.overlaps:
            return failed or 0
        (first_failed,) = self.communicator.all_reduce_max(0 if failed is None else failed + 1)
        if first_failed and failed is None:
            raise OtherRankError(first_failed - 1)
        return first_failed - 1

    def finish(self, loss: Tensor) -> StepResult:
        """Sums gradients and ``loss`` over all ranks, and computes the clipping that :meth:`update` applies."""
        if self._reduction is not None:
            self._reduction.finish(loss)
        norm = self.optimizer.clip(self.clipping.type, self.clipping.threshold)
        return StepResult(loss, norm, self.scale_in_use())

    def finish_and_update(self, loss: Tensor) -> StepResult:
        """Does :meth:`finish`, then :meth:`update`; on a GPU the gradients may be read once for both."""
        if self._reduction is not None:
            self._reduction.finish(loss)
        scale = self.scale_in_use()
        norm = self.optimizer.clip_and_step(self.clipping.type, self.clipping.threshold)
        if self.shares is not None:
            self.shares.spread()
        return StepResult(loss, norm, scale)

    def update(self) -> None:
        """Updates the parameters with the clipped gradients, unless the backward pass has done so."""
        if self._applied:
            self._applied = False
            return
        self.optimizer.step()
        if self.shares is not None:
            self.shares.spread()

    def clear(self) -> None:
        """Clears the gradients."""
        if self._reduction is not None:
            self._reduction.abandon()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def prepare(self, *, gradients: bool = False) -> None:
        """Creates the optimizer's state and, if ``gradients``, zero gradients, before the first step does."""
        self.optimizer.prepare()
        if self.task.recipe.training.averaging.start != "never":
            ParameterAverage(self.optimizer)
        for parameter in self.parameters if gradients else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def random_state(self) -> Tensor:
        """Returns the step's dropout seeds, int64 on its device; empty on a CPU, where torch's generator is used."""
        return torch.zeros(0, dtype=torch.int64) if self.seeds is None else self.seeds.seeds.clone()

    def set_random_state(self, state: Tensor) -> None:
        """Restores the seeds from :meth:`random_state`; seeds saved on another type of device are ignored."""
        if self.seeds is not None and len(state) == len(self.seeds.seeds):
            self.seeds.seeds.copy_(state)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Returns the optimizer's state by name, gathered from all pipeline stages; all ranks call this together."""
        return optimizer_tensors(self.optimizer, dict(self.model.named_parameters()))

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restores the state from :meth:`optimizer_tensors`.

        Raises:
            InputError: See :func:`econmt.engine.optimizers.load_optimizer_tensors`.
        """
        load_optimizer_tensors(self.optimizer, dict(self.model.named_parameters()), tensors, where)

    def make_whole(self) -> None:
        """Gathers the parameters and carried states of all pipeline stages into this process's model."""

    def carried(self) -> dict[str, Tensor]:
        """Returns copies of the states that a step carries over to the next one: the model's buffers, by name."""
        return {name: value.clone() for name, value in self.model.named_buffers()}

    def set_carried(self, values: Mapping[str, Tensor]) -> bool:
        """Restores the states from :meth:`carried`; returns False and changes nothing if the buffers' shapes differ."""
        buffers = dict(self.model.named_buffers())
        fits = {name: value.shape for name, value in buffers.items()} == {
            name: value.shape for name, value in values.items()
        }
        for name, value in values.items() if fits else ():
            buffers[name].copy_(value)
        return fits
