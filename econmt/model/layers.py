"""Small parts that every room of the model uses: LSTM parameters, seeded dropout, initialisation.

Shapes: B batch, S source positions, T target positions, H hidden size, I input size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from econmt.recipe import Initialization
from econmt_ops import LSTMWeights
from econmt_ops.dropout import apply_dropout, keep_mask


class LSTMLayer(nn.Module):
    """The parameters of one LSTM layer in one direction, gates in the order i, f, g, o (as torch.nn.LSTM).

    Attributes:
        input: (4H, I), hidden: (4H, H), bias: (4H,).
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.hidden = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(4 * hidden_size))

    @property
    def weights(self) -> LSTMWeights:
        """The parameters as ``econmt_ops`` takes them."""
        return LSTMWeights(self.input, self.hidden, self.bias)

    def initialize(self, init: Initialization) -> None:
        """Draw first values; every gate is a matrix of its own for the fan-in and fan-out of ``xavier``."""
        hidden_size = self.hidden.shape[1]
        for weight in (self.input, self.hidden):
            for gate in weight.data.chunk(4):
                initialize_matrix(gate, init)
        nn.init.zeros_(self.bias)
        self.bias.data[hidden_size : 2 * hidden_size] = init.forget_bias


class SeededDropout(nn.Module):
    """Dropout whose mask is made from a seed, so that it can be made again instead of being kept.

    The seed comes from torch's default CPU generator, whose state a checkpoint saves. ``variational`` draws one mask
    a row for all its positions (Gal and Ghahramani, 2016).
    """

    def __init__(self, probability: float, variational: bool) -> None:
        super().__init__()
        self.probability = probability
        self.variational = variational

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop units of ``inputs`` (B, T, H) in training mode; the identity otherwise."""
        if not self.training or self.probability == 0.0:
            return inputs
        shape = (inputs.shape[0], 1, inputs.shape[2]) if self.variational else inputs.shape
        return apply_dropout(
            inputs, keep_mask(shape, self.probability, draw_seed(), inputs.device), self.probability
        )


def draw_seed() -> int:
    """A dropout seed from torch's default CPU generator."""
    return int(torch.randint(2**62, (), device="cpu"))


def initialize_matrix(matrix: Tensor, init: Initialization) -> None:
    """Fill a weight matrix (out, in) in place as the recipe says."""
    with torch.no_grad():
        if init.weights == "uniform":
            matrix.uniform_(-init.scale, init.scale)
        else:
            nn.init.xavier_uniform_(matrix)


def initialize_embedding(matrix: Tensor, init: Initialization) -> None:
    """Fill an embedding matrix (V, E) in place; ``xavier`` takes a normal distribution of unit expected row norm."""
    with torch.no_grad():
        if init.weights == "uniform":
            matrix.uniform_(-init.scale, init.scale)
        else:
            matrix.normal_(0.0, 1.0 / math.sqrt(matrix.shape[1]))


def initialize_linear(linear: nn.Linear, init: Initialization) -> None:
    """Fill a linear layer in place; its bias becomes zero."""
    initialize_matrix(linear.weight, init)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def mean_of_valid(outputs: Tensor, lengths: Tensor) -> Tensor:
    """Mean over a row's own positions. outputs (B, S, H), lengths (B,); returns (B, H)."""
    positions = torch.arange(outputs.shape[1], device=outputs.device)
    valid = positions[None, :] < lengths[:, None]
    total = outputs.masked_fill(~valid[:, :, None], 0.0).sum(dim=1)
    return total / lengths.clamp(min=1)[:, None].to(total.dtype)


def weights_of(layers: nn.ModuleList) -> tuple[LSTMWeights, ...]:
    """The parameters of a list of :class:`LSTMLayer`, in its order."""
    return tuple(layer.weights for layer in layers if isinstance(layer, LSTMLayer))
