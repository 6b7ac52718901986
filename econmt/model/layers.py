"""Building blocks of the models: embeddings, recurrent layer parameters, seeded dropout, initialisation.

Shapes: B batch, S source positions, T target positions, H hidden size, I input size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from econmt.config.recipe import Initialization
from econmt.model.cells import CELLS
from econmt_ops import LowRank, LowRankLSTMWeights, LSTMWeights
from econmt_ops.cells.lstm import LSTMCell
from econmt_ops.cells.protocol import Cell
from econmt_ops.core.lengths import padding_of, zero_padding
from econmt_ops.core.weights import AnyLSTMWeights
from econmt_ops.dispatch.rule import device_of
from econmt_ops.products.dropout import RowsSeed, Seed, SeedCounter, apply_dropout, dropout, keep_mask
from econmt_ops.products.look_up import look_up

_FEW = 4
"""Minimum ratio of rows in an embedding to looked-up ids for a sparse gradient."""


class Embedding(nn.Embedding):
    """``torch.nn.Embedding`` whose gradient can be sparse.

    If ``sparse`` is set and few of the words are looked up, the gradient is a sparse tensor with one row per distinct
    word, in order of the ids. Filling and reading the zeros of a dense gradient would take longer than the sums.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the embeddings (..., E) of ids (...), int64."""
        few = _FEW * ids.numel() <= self.num_embeddings
        if self.sparse and few and self.weight.requires_grad and torch.is_grad_enabled():
            rows: Tensor = _LookUp.apply(self.weight, ids, self.padding_idx)  # type: ignore[no-untyped-call]
            return rows
        return look_up(self.weight, ids, self.padding_idx)


class _LookUp(torch.autograd.Function):
    """Look-up of rows of a table (V, E) whose gradient is a coalesced sparse tensor without the row of padding."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding = table.shape, padding
        return functional.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ids, positions = ctx.saved_tensors[0].flatten().sort(stable=True)
        if ctx.padding is not None:
            kept = (ids != ctx.padding).nonzero().flatten()
            ids, positions = ids[kept], positions[kept]
        words, counts = ids.unique_consecutive(return_counts=True)
        begins = counts.cumsum(0) - counts
        sums = functional.embedding_bag(positions, gradient.flatten(0, -2), begins, mode="sum")
        table = torch.sparse_coo_tensor(
            words.unsqueeze(0), sums, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return table, None, None


def give_sparse_gradients(model: nn.Module) -> None:
    """Makes the gradients of a model's embeddings sparse, see :class:`Embedding`."""
    for part in model.modules():
        if isinstance(part, Embedding):
            part.sparse = True


class LayerStage(NamedTuple):
    """Layer of a recurrent stack as a stage of a forward pass, for all positions at once or for one chunk of them.

    Attributes:
        weights: returns its parameters as ``econmt_ops`` takes them.
        size: H.
        seed: seed of dropout on its inputs; None without dropout.
        mask: index of the mask of this dropout, see :func:`econmt_ops.products.dropout.keep_mask`.
        residual: True if its inputs are added to its outputs.
    """

    weights: Callable[[], Any]
    size: int
    seed: Seed | None = None
    mask: int = -1
    residual: bool = False

    def run(
        self,
        below: Tensor,
        drop: Callable[[Tensor, Seed], Tensor],
        recurrence: Callable[[Tensor], tuple[Tensor, Any]],
        contexts: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Any]:
        """Returns outputs (B, T, H) and the state after them, from the outputs below and contexts beside them.

        ``drop`` applies dropout to inputs by a seed; ``recurrence`` runs the layer on them.
        """
        read = below if self.seed is None else drop(below, self.seed)
        outputs, state = recurrence(torch.cat([read, *contexts], -1) if contexts else read)
        return (outputs + read if self.residual else outputs), state


class RecurrentLayer(nn.Module):
    """Parameters of one layer of a cell in one direction, by the names and shapes that the cell gives them."""

    def __init__(self, cell: Cell, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cell, self.hidden_size = cell, hidden_size
        for name, shape in cell.parameter_shapes(input_size, hidden_size).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    @property
    def weights(self) -> Any:
        """Parameters as ``econmt_ops`` takes them."""
        return self.cell.weights(*(getattr(self, name) for name in self.cell.weights._fields))

    def stage(self, seed: Seed | None = None, mask: int = -1, *, residual: bool = False) -> LayerStage:
        """Returns the layer as a stage of a forward pass; see :class:`LayerStage`."""
        return LayerStage(lambda: self.weights, self.hidden_size, seed, mask, residual)

    def initialize(self, init: Initialization) -> None:
        """Draws initial values; the matrix of each gate has its own fan-in and fan-out, and gains are 1."""
        bound = 1.0 / math.sqrt(self.hidden_size) if init.weights == "torch" else None
        # A bias before a normalisation gate by gate has no effect if it is the same for all units.
        forgets = ("shift",) if hasattr(self, "shift") else ("bias", "surrogate_bias")
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dim() == 2:
                for gate in torch.split(parameter.data, self.hidden_size):
                    initialize_matrix(gate, init, bound)
            elif name.endswith("gain"):
                nn.init.ones_(parameter)
            elif bound is not None and name.endswith("bias") and name != "cell_bias":
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.zeros_(parameter)
            if name in forgets:  # the second gate of every cell is its forget gate
                parameter.data[self.hidden_size : 2 * self.hidden_size] += init.forget_bias


class LSTMLayer(RecurrentLayer):
    """Parameters of one LSTM layer in one direction, gates in the order i, f, g, o (as torch.nn.LSTM).

    ``input`` (4H, I) and ``hidden`` (4H, H) are :class:`Factors` if there is a rank; ``bias`` is (4H,).
    """

    input: nn.Parameter | Factors
    hidden: nn.Parameter | Factors
    bias: nn.Parameter

    def __init__(self, input_size: int, hidden_size: int, rank: int | None = None) -> None:
        super().__init__(CELLS["lstm"].cell, input_size, hidden_size)
        if rank is not None:
            del self.input, self.hidden
            self.input = Factors(4 * hidden_size, input_size, rank)
            self.hidden = Factors(4 * hidden_size, hidden_size, rank)

    @property
    def weights(self) -> AnyLSTMWeights:
        """Parameters as ``econmt_ops`` takes them."""
        if isinstance(self.input, Factors) and isinstance(self.hidden, Factors):
            return LowRankLSTMWeights(self.input.matrix, self.hidden.matrix, self.bias)
        full: LSTMWeights = super().weights
        return full

    def initialize(self, init: Initialization) -> None:
        """Draws initial values, see :class:`RecurrentLayer`."""
        super().initialize(init)
        if init.weights == "torch":  # torch.nn.LSTM has two biases, which are added
            bound = 1.0 / math.sqrt(self.hidden_size)
            self.bias.data += torch.empty_like(self.bias).uniform_(-bound, bound)
        for part in (self.input, self.hidden):
            if isinstance(part, Factors):
                part.initialize(init, matrices=4)


class Factors(nn.Module):
    """Parameters of a matrix (N, K), the product of ``left`` (N, r) and ``right`` (r, K), which is never computed."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(rows, rank))
        self.right = nn.Parameter(torch.empty(rank, columns))

    @property
    def matrix(self) -> LowRank:
        """Parameters as ``econmt_ops`` takes them."""
        return LowRank(self.left, self.right)

    def initialize(self, init: Initialization, matrices: int = 1) -> None:
        """Draws initial values so that the product has the variance of a full matrix initialised by ``init``.

        A value of the product is a sum of r products of independent values of mean 0, so its variance is
        r var(left) var(right). With variance s of a full matrix, a^2 / 3 for values uniform in [-a, a], both factors
        are drawn uniformly with variance sqrt(s / r). ``matrices`` are stacked, such as gates, each with its own fan-in
        and fan-out.
        """
        full_bound = init.scale
        if init.weights == "xavier":
            full_bound = math.sqrt(6.0 / (self.left.shape[0] // matrices + self.right.shape[1]))
        elif init.weights == "torch":
            full_bound = 1.0 / math.sqrt(self.left.shape[0] // matrices)
        variance = math.sqrt(full_bound**2 / 3.0 / self.right.shape[0])
        bound = math.sqrt(3.0 * variance)
        for factor in (self.left, self.right):
            nn.init.uniform_(factor, -bound, bound)


class SeededDropout(nn.Module):
    """Dropout whose mask is a function of a seed, so that it can be recomputed instead of kept.

    Seeds come from torch's default CPU generator, whose state checkpoints save.

    Args:
        probability: dropout probability.
        variational: use the same mask at all positions of a row (Gal and Ghahramani, 2016).
        rows: True if the first axis is the batch: processes that share a batch then drop what a single process would
            drop in their rows. False: all processes drop the same.
    """

    def __init__(self, probability: float, variational: bool, *, rows: bool = True) -> None:
        super().__init__()
        self.probability = probability
        self.variational = variational
        self.rows = rows

    def forward(self, inputs: Tensor, seed: Seed | None = None) -> Tensor:
        """Drops units of ``inputs`` (B, T, H) in training mode; the identity otherwise.

        ``seed`` comes from :meth:`draw`; None: drawn now.
        """
        if not self.drops:
            return inputs
        chosen = draw_seed(rows=self.rows) if seed is None else seed
        if device_of(inputs) == "cuda":
            return dropout(inputs, self.probability, chosen, self.variational)
        shape = (inputs.shape[0], 1, inputs.shape[2]) if self.variational else inputs.shape
        mask = keep_mask(shape, self.probability, chosen, inputs.device)
        return apply_dropout(inputs, mask, self.probability)

    @property
    def drops(self) -> bool:
        """True if the module is in training mode and its probability above 0."""
        return self.training and self.probability > 0.0

    def draw(self) -> Seed | None:
        """Draws the seed of the next mask; None if nothing is dropped."""
        return draw_seed(rows=self.rows) if self.drops else None


class _Drawing(threading.local):
    """Dropout seeds of this thread: their source, and the index of this rank's first row in the batch."""

    seeds: SeedCounter | None = None
    first_row: int = 0


_DRAWING = _Drawing()


@contextmanager
def drawing_from(seeds: SeedCounter | None, first_row: int = 0) -> Iterator[None]:
    """Draws dropout seeds within the context from ``seeds``, or from torch's default CPU generator if it is None.

    ``first_row`` is the index of this process's first row in the batch, on which masks depend.
    """
    before = _DRAWING.seeds, _DRAWING.first_row
    _DRAWING.seeds, _DRAWING.first_row = seeds, first_row
    try:
        yield
    finally:
        _DRAWING.seeds, _DRAWING.first_row = before


def draw_seed(*, rows: bool = True) -> Seed:
    """Draws a dropout seed, see :func:`drawing_from`; ``rows``: True if the first axis of masks is the batch."""
    seeds, first_row = _DRAWING.seeds, _DRAWING.first_row
    seed = int(torch.randint(2**62, (), device="cpu")) if seeds is None else seeds.draw()
    return RowsSeed(seed, first_row) if rows and first_row else seed


def initialize_matrix(matrix: Tensor, init: Initialization, bound: float | None = None) -> None:
    """Initialises a weight matrix (out, in) in place; ``bound`` is that of weights torch, by default 1 / sqrt(in)."""
    with torch.no_grad():
        if init.weights == "xavier":
            nn.init.xavier_uniform_(matrix)
            return
        if init.weights == "uniform":
            bound = init.scale
        elif bound is None:
            bound = 1.0 / math.sqrt(matrix.shape[1])
        matrix.uniform_(-bound, bound)


def initialize_embedding(matrix: Tensor, init: Initialization) -> None:
    """Initialises an embedding matrix (V, E) in place; ``xavier`` draws rows of expected norm 1, ``torch`` sqrt(E)."""
    scale = init.scale if init.weights == "uniform" else None
    scale = scale if init.embedding_scale is None else init.embedding_scale
    with torch.no_grad():
        if scale is not None:
            matrix.uniform_(-scale, scale)
        else:
            matrix.normal_(0.0, 1.0 if init.weights == "torch" else 1.0 / math.sqrt(matrix.shape[1]))


def initialize_linear(linear: nn.Linear, init: Initialization) -> None:
    """Initialises a linear layer in place; its bias becomes zero."""
    initialize_matrix(linear.weight, init)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def mean_of_valid(outputs: Tensor, lengths: Tensor) -> Tensor:
    """Computes the mean (B, H) of outputs (B, S, H) over the positions within lengths (B,)."""
    total = zero_padding(outputs, padding_of(outputs, lengths)).sum(dim=1)
    return total / lengths.clamp(min=1)[:, None].to(total.dtype)


def make_layer(name: str, input_size: int, hidden_size: int, rank: int | None = None) -> RecurrentLayer:
    """Creates the parameters of one layer of the cell with a name in recipes; only an LSTM may have a rank."""
    cell = CELLS[name].cell
    if isinstance(cell, LSTMCell):
        return LSTMLayer(input_size, hidden_size, rank)
    return RecurrentLayer(cell, input_size, hidden_size)


def weights_of(layers: nn.ModuleList) -> tuple[Any, ...]:
    """Returns the parameters of a list of :class:`RecurrentLayer` as ``econmt_ops`` takes them."""
    return tuple(layer.weights for layer in layers if isinstance(layer, RecurrentLayer))


class SkipInitialization(TorchFunctionMode):
    """Skips the random initialization of a model whose parameters are loaded at once.

    Initialization takes half of the loading time. The "meta" device would avoid it too, but its first operation makes
    torch import half of its compiler, which takes seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        initializes = func in (torch.Tensor.uniform_, torch.Tensor.normal_)
        if initializes or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else keywords["tensor"]
        return func(*args, **keywords)
