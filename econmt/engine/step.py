"""The training step, the only one: what is measured, planned and benchmarked is what is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from econmt.data.batching.batch import AnyBatch
from econmt.engine.averaging import ParameterAverage
from econmt.engine.communicator import Communicator, Reduction
from econmt.engine.freeze import fix_parameters
from econmt.engine.optimizers import load_optimizer_tensors, make_optimizer, optimizer_tensors
from econmt.engine.precision import Precision
from econmt.model import Implementations
from econmt.model.layers import drawing_from, give_sparse_gradients
from econmt.tasks.protocol import Task, device_of
from econmt_ops.core.dropout import SeedCounter
from econmt_ops.optimizer import FusedOptimizer

Watch = Callable[[str, Tensor | None], object]
"""Told when "forward" begins, when "backward" begins, with the value that is differentiated, and "optimizer"."""


class StepResult(NamedTuple):
    """Loss and gradient norm of an update, scalars on the device.

    Attributes:
        loss: in nats, summed over all target tokens.
        norm: of the gradient of the loss a token, before clipping.
    """

    loss: Tensor
    norm: Tensor


class OtherRankError(RuntimeError):
    """Another rank could not compute the gradient of a batch, so that this one leaves its own.

    Attributes:
        number: of the batch.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"another rank could not compute batch {number}")
        self.number = number


class TrainingStep:
    """Zero, forward and backward of every batch, all-reduce, clip, update.

    Nothing between "the batches are on the device" and "the parameters are updated" (:meth:`run`) asks for a value of a
    tensor on a GPU or depends on anything but tensors, shapes and the settings below, so that it can be captured in a
    CUDA graph for each shape. On the CPU the optimizer looks whether there is anything to clip, and embeddings get
    sparse gradients, which an update has to ask for their rows.

    Args:
        task: what is learnt; the recipe of its run has the optimizer, the clipping and the label smoothing.
        model: of the task, on the device.
        precision: of products and feature maps.
        implementations: of the ops; None: those of the recipe.
        optimizer: over the model's parameters; None: a new one, as the recipe says.
        world: the processes that train together.
        stands_for: the type of device that fake tensors are meant to be on; None: where the model is.

    Attributes:
        overlaps: let gradients leave for other ranks while the backward pass still runs; else after it, so that a
            backward pass that fails has sent nothing.
        keeps_gradients: fill gradients with zeros from one step to the next instead of giving them back, so that they
            stay where they are in memory.
        seconds: that gradients have taken here, not counted what other ranks were waited for; of a GPU those that its
            work took to be launched.
        number: of the batch whose gradient is being computed; after an error, of the one that failed.
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
        self.device = device_of(model)
        self.precision = Precision() if precision is None else precision
        self.implementations = (
            Implementations.of(task.recipe.ops) if implementations is None else implementations
        )
        self.communicator = Communicator() if communicator is None else communicator
        self.clipping = training.gradient_clipping
        self.label_smoothing = training.label_smoothing
        fix_parameters(model, training)
        self.shares = self.communicator.shares(model.parameters())
        if optimizer is None:
            owned = None if self.shares is None else self.shares.owned
            optimizer = make_optimizer(dict(model.named_parameters()), training.optimizer, owned)
        self.optimizer = optimizer
        self.keeps_gradients = False
        self.overlaps = True
        self._reduction = self.make_reduction()
        self.number: int | None = None
        self.seconds = 0.0
        self.seeds: SeedCounter | None = None
        if self.device.type == "cuda":
            self.seeds = SeedCounter(training.seed, self.device)
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=self.device)
        if (target_device or self.device.type) == "cpu":
            give_sparse_gradients(model)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients a step makes in this process."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """These with the names that they have, or the whole of which they are rows, in the model."""
        yield from self.model.named_parameters()

    def make_reduction(self) -> Reduction | None:
        """Returns the reduction that adds gradients over ranks during the backward pass, or None if there is none."""
        return self.communicator.reduction(self.parameters)

    def __call__(self, batches: Sequence[AnyBatch]) -> StepResult:
        """An update from batches that may still lie on the CPU; see :meth:`run`."""
        return self.run([batch.to(self.device) for batch in batches], self.tokens(batches))

    def tokens(self, batches: Sequence[AnyBatch], number: int | None = None) -> Tensor:
        """The target tokens of batches, or that ``number``, as an int64 scalar on the device."""
        tokens = torch.tensor(sum(batch.target_tokens for batch in batches) if number is None else number)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens

    def run(
        self,
        batches: Sequence[AnyBatch],
        tokens: Tensor,
        implementations: Sequence[Implementations] | None = None,
        watch: Watch | None = None,
    ) -> StepResult:
        """One update of the parameters.

        Args:
            batches: on the device; their gradients are added up.
            tokens: the number by which the sum of their losses is divided, an int64 scalar on the device.
            implementations: of the ops for each batch; None: the step's.
            watch: told of the phases.
        """
        result = self.gradient(batches, tokens, implementations, watch)
        self.update()
        return result

    def gradient(
        self,
        batches: Sequence[AnyBatch],
        tokens: Tensor,
        implementations: Sequence[Implementations] | None = None,
        watch: Watch | None = None,
    ) -> StepResult:
        """Leaves the gradient of the loss a token in the parameters, to be clipped by :meth:`update`.

        See :meth:`run` for the arguments.
        """
        self.clear()
        return self.add_gradient(batches, tokens, implementations, watch)

    def add_gradient(
        self,
        batches: Sequence[AnyBatch],
        tokens: Tensor,
        implementations: Sequence[Implementations] | None = None,
        watch: Watch | None = None,
    ) -> StepResult:
        """:meth:`gradient` that adds to what is there."""
        began = time.monotonic()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            chosen = self.implementations if implementations is None else implementations[number]
            self.number = number
            if self._reduction is not None and self.overlaps and number == len(batches) - 1:
                self._reduction.begin()
            total = total + self.accumulate(batch, tokens, chosen, watch)
        self.number = None
        self.seconds += time.monotonic() - began
        if self._reduction is not None and not self.overlaps:
            self._reduction.pack()
        self.agree()
        if watch is not None:
            watch("optimizer", None)
        return self.finish(total)

    def agree(self, failed: int | None = None) -> int:
        """Finds out with the other ranks whether all have come so far, unless gradients are on their way already.

        Args:
            failed: the number of the batch that this rank could not compute; None: it could.

        Returns:
            The number of the batch that some rank could not compute.

        Raises:
            OtherRankError: this rank could compute all, and another could not.
        """
        if self.communicator.size == 1 or self.overlaps:
            return failed or 0
        (found,) = self.communicator.all_reduce_max(0 if failed is None else failed + 1)
        if found and failed is None:
            raise OtherRankError(found - 1)
        return found - 1

    def finish(self, loss: Tensor) -> StepResult:
        """Adds gradients and the summed ``loss`` up over all ranks, and bounds the gradients of :meth:`update`."""
        if self._reduction is not None:
            self._reduction.finish(loss)
        return StepResult(loss, self.optimizer.clip(self.clipping.type, self.clipping.threshold))

    def update(self) -> None:
        """Updates the parameters with the gradients that are there, clipped."""
        self.optimizer.step()
        if self.shares is not None:
            self.shares.spread()

    def clear(self) -> None:
        """Forgets the gradients."""
        if self._reduction is not None:
            self._reduction.abandon()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def set_learning_rate(self, rate: float) -> None:
        """Sets the rate of the next update."""
        self.optimizer.set_learning_rate(rate)

    def prepare(self, *, gradients: bool = False) -> None:
        """Makes what a first step would make: the optimizer's state and, if wanted, gradients filled with zeros."""
        self.optimizer.prepare()
        if self.task.recipe.training.averaging.start != "never":
            ParameterAverage(self.optimizer)
        for parameter in self.parameters if gradients else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def random_state(self) -> Tensor:
        """The dropout seeds that the step draws itself, int64 on its device; none where torch gives them."""
        return torch.zeros(0, dtype=torch.int64) if self.seeds is None else self.seeds.seeds.clone()

    def set_random_state(self, state: Tensor) -> None:
        """Puts back what :meth:`random_state` gave; seeds of another device are left as they are."""
        if self.seeds is not None and len(state) == len(self.seeds.seeds):
            self.seeds.seeds.copy_(state)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state by name, of all stages where ranks hold one model together: all call this at once."""
        return optimizer_tensors(self.optimizer, dict(self.model.named_parameters()))

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Puts back what :meth:`optimizer_tensors` gave.

        Raises:
            InputError: as :func:`econmt.engine.optimizers.load_optimizer_tensors`.
        """
        load_optimizer_tensors(self.optimizer, dict(self.model.named_parameters()), tensors, where)

    def make_whole(self) -> None:
        """Gives the model here the parameters, and what it carries, of all stages, where ranks hold it together."""

    def carried(self) -> dict[str, Tensor]:
        """Copies of what a step hands to the next one beside parameters: the model's buffers, by name."""
        return {name: value.clone() for name, value in self.model.named_buffers()}

    def set_carried(self, values: Mapping[str, Tensor]) -> bool:
        """Puts back what :meth:`carried` gave; False, and nothing is done, if the buffers have other shapes by now."""
        buffers = dict(self.model.named_buffers())
        fits = {name: value.shape for name, value in buffers.items()} == {
            name: value.shape for name, value in values.items()
        }
        for name, value in values.items() if fits else ():
            buffers[name].copy_(value)
        return fits

    def accumulate(
        self,
        batch: AnyBatch,
        tokens: Tensor,
        implementations: Implementations | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Adds the gradient of a batch on the device to those that are there.

        Args:
            batch: see :meth:`run`, as the others.
            tokens: the number by which its loss is divided.
            implementations: of the ops; None: the step's.
            watch: told of the phases.

        Returns:
            Its summed loss, a scalar on the device.
        """
        if implementations is None:
            implementations = self.implementations
        self.optimizer.make_dense()  # what is there already, for this batch's to be added to in place
        if self.seeds is not None:
            self.seeds.advance()
        if watch is not None:
            watch("forward", None)
        first_row = self.communicator.replica * len(batch.indices)
        with self.precision.products(self.device), drawing_from(self.seeds, first_row):
            with self.precision.autocast(self.device):
                loss = self.task.loss(self.model, batch, implementations, self.label_smoothing)
            mean = loss / tokens
            if watch is not None:
                watch("backward", mean)
            torch.autograd.backward(mean)
        return loss.detach()
