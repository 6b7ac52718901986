"""The training step of one rank of a pipeline: layers divided over ranks, the output layer by vocabulary.

Every rank holds the whole model, but gradients, optimizer state and feature maps of its own stage only. All ranks draw
the same dropout seeds and read the same batch, so that only values between layers are communicated; see
:mod:`econmt.parallel.pipeline.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from econmt.data.batching.batch import AnyBatch
from econmt.engine.communicator import Communicator
from econmt.engine.optimizers import load_optimizer_tensors, make_optimizer
from econmt.engine.precision import Precision
from econmt.engine.step import OnPhase, StepResult, TrainingStep
from econmt.model import Implementations
from econmt.parallel.pipeline.output import Slice, split_cross_entropy
from econmt.parallel.pipeline.parts import DividedTable, Parts
from econmt.parallel.pipeline.plan import Walk
from econmt.parallel.pipeline.stages import Stages, even_rows
from econmt.parallel.reduction import BucketedReduction, travelling
from econmt.tasks.protocol import Task
from econmt_ops.core.scopes import layer


class Divided(NamedTuple):
    """Model divided over pipeline stages.

    Attributes:
        homes: Stage that trains each parameter; -1 if every stage trains its own rows.
        output: Output layer, whose rows are divided over the stages.
        pad: Padding id, which has no loss.
        parts: Creates the parts of a batch's forward pass.
        carried: Stages of the layers along axis 1 of the model's buffers, which are carried from step to step.
    """

    homes: Mapping[str, int]
    output: nn.Linear
    pad: int
    parts: Callable[[AnyBatch, Implementations], Parts]
    carried: Sequence[int] = ()


class PipelinedStep(TrainingStep):
    """Training step in which this rank computes its pipeline stage; see :class:`econmt.engine.step.TrainingStep`.

    Args:
        model: Model of the task, on the device, with the same values on all ranks.
        implementations: Implementations of the ops; None: those of the recipe.
        communicator: Communicator of all ranks, including those of other replicas.
        target_device: Device type that fake tensors represent; None: the model's device.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        stages: Stages,
        divided: Divided,
        precision: Precision | None = None,
        *,
        implementations: Implementations | None = None,
        communicator: Communicator | None = None,
        target_device: str | None = None,
    ) -> None:
        self.stages, self.divided = stages, divided
        parameters = dict(model.named_parameters())
        rows = even_rows(divided.output.out_features, stages.size, stages.rank)
        self.local = {
            name: nn.Parameter(parameters[name].data[rows]) if home < 0 else parameters[name]
            for name, home in divided.homes.items()
            if home in (-1, stages.rank)
        }
        """This rank's parameters by name; of a divided one its rows, as a view of the model's."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._weight = self.local[names[id(divided.output.weight)]]
        self._bias = self.local[names[id(divided.output.bias)]]
        self._table = DividedTable(self._weight, divided.output.out_features, divided.pad, stages)
        optimizer = make_optimizer(self.local, task.recipe.training.optimizer)
        super().__init__(
            task,
            model,
            precision,
            implementations=implementations,
            optimizer=optimizer,
            communicator=communicator,
            target_device=target_device,
        )
        self._positions = self._norm_positions()
        self._over_replicas: BucketedReduction | None = None
        if stages.replicas > 1:
            replicas = stages.of_replicas(self.communicator.watched)
            dtype = travelling(task.recipe.parallel)
            self._over_replicas = BucketedReduction(self.local.values(), replicas, dtype)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See :meth:`econmt.engine.step.TrainingStep.named_parameters`."""
        yield from self.local.items()

    def make_whole(self) -> None:
        """Gathers the whole model on every rank; see :meth:`econmt.engine.step.TrainingStep.make_whole`."""
        parameters = dict(self.model.named_parameters())
        with self.communicator.watched(), torch.no_grad():
            for name, home in self.divided.homes.items():
                self._gather_stages(parameters[name].data, home)
            for buffer in self.model.buffers():
                for layer_number, home in enumerate(self.divided.carried):
                    part = buffer[:, layer_number].contiguous()
                    self.stages.broadcast(part, home).wait()
                    buffer[:, layer_number].copy_(part)

    def _gather_stages(self, tensor: Tensor, home: int) -> None:
        """Copies a tensor from the stage that holds it to all others, or each stage's rows if it is divided."""
        if home >= 0:
            self.stages.broadcast(tensor, home).wait()
            return
        for rank in range(self.stages.size):
            self.stages.broadcast(tensor[even_rows(len(tensor), self.stages.size, rank)], rank).wait()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Returns the optimizer's state on the CPU; see :meth:`econmt.engine.step.TrainingStep.optimizer_tensors`."""
        parameters = dict(self.model.named_parameters())
        if self.optimizer.state:
            self.optimizer.prepare()
        kinds = {kind: value.dim() for kind, value in self.optimizer.state.get(self._weight, {}).items()}
        gathered = {}
        with self.communicator.watched(), torch.no_grad():
            for name, home in self.divided.homes.items():
                for kind, dimensions in kinds.items():
                    local = None if name not in self.local else self.optimizer.state[self.local[name]][kind]
                    if dimensions == 0:  # a counter, the same for all rows
                        full = torch.zeros((), device=self.device) if local is None else local.clone()
                        self.stages.broadcast(full, max(home, 0)).wait()
                    else:
                        full = torch.zeros_like(parameters[name])
                        if local is not None:
                            self._rows_of(full, home).copy_(local)
                        self._gather_stages(full, home)
                    gathered[f"{kind}/{name}"] = full.cpu()
        return gathered

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """See :meth:`econmt.engine.step.TrainingStep.load_optimizer_tensors`."""
        parameters = dict(self.model.named_parameters())
        local = {}
        for key, value in tensors.items():
            name = key.partition("/")[2]
            if name not in parameters or (value.dim() > 0 and value.shape != parameters[name].shape):
                local[key] = value  # load_optimizer_tensors raises the error
            elif name in self.local:
                local[key] = value if value.dim() == 0 else self._rows_of(value, self.divided.homes[name])
        load_optimizer_tensors(self.optimizer, self.local, local, where)

    def _rows_of(self, tensor: Tensor, home: int) -> Tensor:
        """Returns this rank's rows of a divided tensor, or all rows of another one."""
        return tensor[even_rows(len(tensor), self.stages.size, self.stages.rank)] if home < 0 else tensor

    def compute(
        self, batch: AnyBatch, tokens: Tensor, implementations: Implementations, on_phase: OnPhase
    ) -> Tensor:
        """Returns the loss of the whole batch on every rank; see :meth:`econmt.engine.step.TrainingStep.accumulate`."""
        with self.communicator.watched():
            with self.precision.autocast(self.device):
                forward_parts = self.divided.parts(batch, implementations)
                with layer("embedding"):
                    for item in forward_parts.look_ups:
                        self._table.look_up(item)
                walk = Walk(forward_parts.parts, self.stages.rank, self.stages, self.device)
                hidden_outputs = walk.forward([forward_parts.hidden])
            on_phase("backward", None)
            with layer("output"):
                loss, gradient = self._loss(hidden_outputs, forward_parts, tokens)
            walk.backward({forward_parts.hidden: gradient} if hidden_outputs else {})
            with layer("embedding"):
                for item in forward_parts.look_ups:
                    self._table.add_gradient(item)
            # The parts refer to the object that created them. This cycle would keep the update's gradient functions
            # alive, with the streams on which they were made, and no CUDA graph may wait for those.
            forward_parts.parts.clear()
        return loss

    def _loss(
        self, hidden_outputs: list[Tensor], forward_parts: Parts, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the output layer: returns the summed loss, and the gradient of the hidden vectors on their rank."""
        part = forward_parts.parts[forward_parts.hidden[0]]
        last, (shape, dtype) = part.rank, part.outputs[0]
        hidden = (
            hidden_outputs[0].detach().contiguous()
            if hidden_outputs
            else torch.empty(shape, dtype=dtype, device=self.device)
        )
        self.stages.broadcast(hidden, last).wait()
        vocabulary, size = self.divided.output.out_features, self.stages.size
        first = even_rows(vocabulary, size, self.stages.rank).start
        vocabulary_slice = Slice(self._weight, self._bias, first, vocabulary, -(-vocabulary // size))
        shares = split_cross_entropy(
            hidden.flatten(0, 1),
            forward_parts.targets.flatten(),
            vocabulary_slice,
            self.stages.gather,
            scale=self.scaled(tokens.to(torch.float32).reciprocal()),
            label_smoothing=self.label_smoothing,
            ignore_index=self.divided.pad,
        )
        for parameter, gradient in ((self._weight, shares.weight), (self._bias, shares.bias)):
            _add(parameter, gradient)
        self.stages.reduce(shares.hidden, last).wait()
        return shares.loss.to(torch.float32), shares.hidden.view(shape)

    def finish(self, loss: Tensor) -> StepResult:
        """Computes the norm over all stages' gradients; see :meth:`econmt.engine.step.TrainingStep.finish`."""
        if self._over_replicas is not None:
            self._over_replicas.finish(loss)
        local_norms = self.optimizer.norms()
        norms = local_norms.new_zeros(self._positions[1]).index_copy_(0, self._positions[0], local_norms)
        with self.communicator.watched():
            self.stages.all_reduce(norms).wait()
        norm = torch.linalg.vector_norm(norms)
        norm = self.optimizer.clip(self.clipping.type, self.clipping.threshold, norm)
        return StepResult(loss, norm, self.scale_in_use())

    def finish_and_update(self, loss: Tensor) -> StepResult:
        """See :meth:`econmt.engine.step.TrainingStep.finish_and_update`."""
        result = self.finish(loss)
        self.update()
        return result

    def _norm_positions(self) -> tuple[Tensor, int]:
        """Returns the positions of this rank's gradient norms in the list of all norms, and the length of that list.

        With fixed positions the norm is summed in the same order however layers are divided.
        """
        mine, count = [], 0
        for home in self.divided.homes.values():
            if home == self.stages.rank:
                mine.append(count)
            elif home < 0:
                mine.append(count + self.stages.rank)
            count += self.stages.size if home < 0 else 1
        return torch.tensor(mine, device=self.device), count


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds to a parameter's gradient, in the parameter's type."""
    converted = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = converted
    else:
        parameter.grad += converted
