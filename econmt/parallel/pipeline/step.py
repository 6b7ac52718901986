"""The training step of one rank of a pipeline: layers divided over ranks, the output layer by vocabulary.

Every rank has the whole model, but trains its own parameters only: gradients, the optimizer's state and feature maps
are those of its stage. The ranks draw the same dropout seeds and read the same batch, so that only what goes from layer
to layer travels, see :mod:`econmt.parallel.pipeline.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from econmt.data.batching.batch import AnyBatch
from econmt.engine.communicator import Communicator, Reduction
from econmt.engine.optimizers import load_optimizer_tensors, make_optimizer
from econmt.engine.precision import Precision
from econmt.engine.step import StepResult, TrainingStep, Watch
from econmt.model import Implementations
from econmt.model.layers import drawing_from
from econmt.parallel.pipeline.embedding import DividedTable, LookUp
from econmt.parallel.pipeline.output import Slice, split_cross_entropy
from econmt.parallel.pipeline.plan import Like, Output, PipelinePart, Walk
from econmt.parallel.pipeline.stages import Stages, even_rows
from econmt.parallel.reduction import BucketedReduction, travelling
from econmt.tasks.protocol import Task
from econmt_ops.core.scopes import layer


class Parts(Protocol):
    """The forward pass of a batch up to what the output layer reads; all ranks make the same.

    Attributes:
        parts: of all ranks.
        hidden: the output that the output layer reads.
        like: what it looks like, (B, T, D).
        targets: (B, T) the tokens that are learnt.
        look_ups: in the matrix of the output layer, where a table is tied to it.
    """

    parts: list[PipelinePart]
    hidden: Output
    like: Like
    targets: Tensor
    look_ups: list[LookUp]


class Divided(NamedTuple):
    """A model divided over the stages.

    Attributes:
        homes: of every parameter the stage that trains it; -1: all of them, each its rows.
        output: the output layer, whose rows are divided.
        pad: the id that no loss counts.
        parts: of a batch's forward pass.
        carried: the buffers that a step hands to the next one, an axis of each, and by place on it whose that is.
    """

    homes: Mapping[str, int]
    output: nn.Linear
    pad: int
    parts: Callable[[AnyBatch, Implementations], Parts]
    carried: Callable[[], list[tuple[Tensor, int, Sequence[int]]]]


class PipelinedStep(TrainingStep):
    """A training step of which this rank does its stage's share; see :class:`econmt.engine.step.TrainingStep`.

    Args:
        task: what is learnt.
        model: of the task, on the device, with the same values on all ranks.
        stages: the ranks of the pipeline.
        divided: the model over them.
        precision: of products and feature maps.
        implementations: of the ops; None: those of the recipe.
        world: all ranks, those of other replicas among them.
        stands_for: see :class:`econmt.engine.step.TrainingStep`.
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
        self.own = {
            name: nn.Parameter(parameters[name].data[rows]) if home < 0 else parameters[name]
            for name, home in divided.homes.items()
            if home in (-1, stages.rank)
        }
        """This rank's parameters by name: of a divided one its rows, which lie where they lie in the model."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._weight = self.own[names[id(divided.output.weight)]]
        self._bias = self.own[names[id(divided.output.bias)]]
        self._table = DividedTable(self._weight, divided.output.out_features, divided.pad, stages)
        optimizer = make_optimizer(self.own, task.recipe.training.optimizer)
        super().__init__(
            task,
            model,
            precision,
            implementations=implementations,
            optimizer=optimizer,
            communicator=communicator,
            target_device=target_device,
        )
        self._places = self._norm_places()
        self._over_replicas: BucketedReduction | None = None
        if stages.replicas > 1:
            replicas = stages.of_replicas(self.communicator.watched)
            dtype = travelling(task.recipe.parallel)
            self._over_replicas = BucketedReduction(self.own.values(), replicas, dtype)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See :meth:`econmt.engine.step.TrainingStep.named_parameters`."""
        yield from self.own.items()

    def make_reduction(self) -> Reduction | None:
        """None: a gradient is complete after the last chunk only."""
        return None

    # ------------------------------------------------------------------ what is saved

    def make_whole(self) -> None:
        """See :meth:`econmt.engine.step.TrainingStep.make_whole`; every rank gets all."""
        parameters = dict(self.model.named_parameters())
        with self.communicator.watched(), torch.no_grad():
            for name, home in self.divided.homes.items():
                self._whole(parameters[name].data, home)
            for buffer, axis, homes in self.divided.carried():
                for place, home in enumerate(homes):
                    part = buffer.select(axis, place).contiguous()
                    self.stages.broadcast(part, home)
                    buffer.select(axis, place).copy_(part)

    def _whole(self, tensor: Tensor, home: int) -> None:
        """Gives all stages a tensor that one of them has, or its rows that each has."""
        if home >= 0:
            self.stages.broadcast(tensor, home)
            return
        for rank in range(self.stages.size):
            self.stages.broadcast(tensor[even_rows(len(tensor), self.stages.size, rank)], rank)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """See :meth:`econmt.engine.step.TrainingStep.optimizer_tensors`; they are in the memory of the processor."""
        parameters = dict(self.model.named_parameters())
        if self.optimizer.state:
            self.optimizer.prepare()
        kinds = {kind: value.dim() for kind, value in self.optimizer.state.get(self._weight, {}).items()}
        found = {}
        with self.communicator.watched(), torch.no_grad():
            for name, home in self.divided.homes.items():
                for kind, dimensions in kinds.items():
                    own = None if name not in self.own else self.optimizer.state[self.own[name]][kind]
                    if dimensions == 0:  # a count, the same for all rows
                        whole = torch.zeros((), device=self.device) if own is None else own.clone()
                        self.stages.broadcast(whole, max(home, 0))
                    else:
                        whole = torch.zeros_like(parameters[name])
                        if own is not None:
                            self._rows_of(whole, home).copy_(own)
                        self._whole(whole, home)
                    found[f"{kind}/{name}"] = whole.cpu()
        return found

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """See :meth:`econmt.engine.step.TrainingStep.load_optimizer_tensors`."""
        parameters = dict(self.model.named_parameters())
        own = {}
        for key, value in tensors.items():
            name = key.partition("/")[2]
            if name not in parameters or (value.dim() > 0 and value.shape != parameters[name].shape):
                own[key] = value  # which is refused
            elif name in self.own:
                own[key] = value if value.dim() == 0 else self._rows_of(value, self.divided.homes[name])
        load_optimizer_tensors(self.optimizer, self.own, own, where)

    def _rows_of(self, whole: Tensor, home: int) -> Tensor:
        """This rank's rows of a divided tensor; all of another."""
        return whole[even_rows(len(whole), self.stages.size, self.stages.rank)] if home < 0 else whole

    # ------------------------------------------------------------------ a batch

    def accumulate(
        self,
        batch: AnyBatch,
        tokens: Tensor,
        implementations: Implementations | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """See :meth:`econmt.engine.step.TrainingStep.accumulate`; every rank returns the loss of the whole batch."""
        how = self.implementations if implementations is None else implementations
        self.optimizer.make_dense()
        if self.seeds is not None:
            self.seeds.advance()
        if watch is not None:
            watch("forward", None)
        first_row = self.stages.replica * len(batch.indices)
        with (
            self.communicator.watched(),
            self.precision.products(self.device),
            drawing_from(self.seeds, first_row),
        ):
            with self.precision.autocast(self.device):
                whole = self.divided.parts(batch, how)
                with layer("embedding"):
                    for each in whole.look_ups:
                        self._table.look_up(each)
                walk = Walk(whole.parts, self.stages.rank, self.stages, self.device)
                found = walk.forward([whole.hidden])
            if watch is not None:
                watch("backward", None)
            with layer("output"):
                loss, gradient = self._loss(found, whole, tokens)
            walk.backward({whole.hidden: gradient} if found else {})
            with layer("embedding"):
                for each in whole.look_ups:
                    self._table.add_gradient(each)
            # They know whoever made them. In that circle this update's gradient functions would live on, with the
            # streams that they were made on, which no CUDA graph may wait for.
            whole.parts.clear()
        return loss

    def _loss(self, found: list[Tensor], whole: Parts, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The output layer: the summed loss, and the gradient of the hidden vectors where they were made."""
        last = whole.parts[whole.hidden[0]].rank
        hidden = (
            found[0].detach().contiguous()
            if found
            else torch.empty(whole.like.shape, dtype=whole.like.dtype, device=self.device)
        )
        self.stages.broadcast(hidden, last)
        vocabulary, size = self.divided.output.out_features, self.stages.size
        first = even_rows(vocabulary, size, self.stages.rank).start
        own = Slice(self._weight, self._bias, first, vocabulary, -(-vocabulary // size))
        shares = split_cross_entropy(
            hidden.flatten(0, 1),
            whole.targets.flatten(),
            own,
            self.stages.gather,
            scale=tokens.to(torch.float32).reciprocal(),
            label_smoothing=self.label_smoothing,
            ignore_index=self.divided.pad,
        )
        for parameter, gradient in ((self._weight, shares.weight), (self._bias, shares.bias)):
            _add(parameter, gradient)
        self.stages.reduce(shares.hidden, last)
        return shares.loss.to(torch.float32), shares.hidden.view(whole.like.shape)

    # ------------------------------------------------------------------ an update

    def finish(self, loss: Tensor) -> StepResult:
        """See :meth:`econmt.engine.step.TrainingStep.finish`; the norm is that of all stages' gradients."""
        if self._over_replicas is not None:
            self._over_replicas.finish(loss)
        own = self.optimizer.norms()
        norms = own.new_zeros(self._places[1]).index_copy_(0, self._places[0], own)
        with self.communicator.watched():
            self.stages.all_reduce(norms)
        norm = torch.linalg.vector_norm(norms)
        return StepResult(loss, self.optimizer.clip(self.clipping.type, self.clipping.threshold, norm))

    def _norm_places(self) -> tuple[Tensor, int]:
        """Returns the positions of this rank's gradient norms among those of all ranks, and their number.

        So the norm is a sum in one order, wherever the layers are.
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
    """Adds to the gradient of a parameter, in its type."""
    own = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = own
    else:
        parameter.grad += own
