"""Attention, decoder and output layer as modules, with the parameter names of `torch.nn` where a counterpart exists."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt_ops.additive_attention import additive_attention
from econmt_ops.attentional_lstm import attentional_lstm
from econmt_ops.core.shapes import Shapes
from econmt_ops.core.weights import AttentionalLSTMState, AttentionalLSTMWeights
from econmt_ops.linear_cross_entropy import linear_cross_entropy
from econmt_ops.modules.rnn import LSTM
from econmt_ops.products.dropout import seed_of


class AdditiveAttention(nn.Module):
    """Additive attention with linear projections of query and keys (Bahdanau, Cho and Bengio 2015).

    The parameters are ``query.weight``, ``key.weight``, ``key.bias``, ``score`` and, with layer normalization,
    ``layer_norm.weight`` and ``layer_norm.bias``. The equations are those of `econmt_ops.additive_attention`.

    Args:
        query_size: Number of features of a query before its projection.
        key_size: Number of features of a key before its projection.
        attention_size: A, number of features of the projections.
        layer_norm: If True, query + keys is normalized before tanh.
        implementation: "auto" or the name of an implementation of `econmt_ops.additive_attention`.
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        attention_size: int,
        *,
        layer_norm: bool = False,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        self.query = nn.Linear(query_size, attention_size, bias=False)
        self.key = nn.Linear(key_size, attention_size)
        self.score = nn.Parameter(torch.empty(attention_size))
        self.layer_norm = nn.LayerNorm(attention_size) if layer_norm else None
        self.implementation = implementation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes ``score`` again; the submodules have methods of this name for their parameters."""
        _reset_score(self.score)

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor | None = None, *, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes the attention of every query over all keys.

        Args:
            query: Queries, (B, T, query_size).
            keys: Keys, (B, S, key_size).
            values: Values, (B, S, E); None to use the keys.
            lengths: Numbers of valid keys, (B,) int64; None if every row has S keys.

        Returns:
            Contexts (B, T, E) and attention weights (B, T, S).

        Raises:
            ValueError: If shapes or types do not fit.
        """
        check = Shapes("AdditiveAttention", query_size=self.query.in_features, key_size=self.key.in_features)
        check("query", query, "B T query_size")
        check("keys", keys, "B S key_size")
        return additive_attention(
            self.query(query),
            self.key(keys),
            keys if values is None else values,
            self.score,
            lengths=lengths,
            layer_norm=_gain_and_bias(self.layer_norm),
            implementation=self.implementation,
        )


class AttentionalLSTM(nn.Module):
    """Decoder of stacked LSTM layers with attention and optional input feeding (Luong, Pham and Manning 2015).

    The parameters are those of ``lstm`` (an `LSTM`), ``query.weight``, ``key.weight``, ``combine.weight`` and
    ``combine.bias``; additive attention adds ``key.bias``, ``score`` and, with layer normalization,
    ``layer_norm.weight`` and ``layer_norm.bias``. The equations are those of `econmt_ops.attentional_lstm`.

    Args:
        input_size: I, number of input features.
        hidden_size: H, number of features of the LSTM layers and of the outputs.
        memory_size: E, number of features of the memory that is attended to.
        attention_size: A, number of features of the projected queries and keys.
        num_layers: L, number of stacked layers.
        attention: Score of a query and a key: "additive", or "dot" for their inner product.
        scale: Factor of the scores of dot attention.
        input_feeding: If True, the bottom layer also reads the output of the step before.
        residual, dropout, variational: As of `LSTM`.
        layer_norm: If True, query + keys is normalized before tanh.
        implementation: "auto" or the name of an implementation of `econmt_ops.attentional_lstm`.

    Raises:
        ValueError: If the attention is unknown.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        memory_size: int,
        attention_size: int,
        num_layers: int = 1,
        *,
        attention: str = "additive",
        scale: float = 1.0,
        input_feeding: bool = True,
        residual: bool = False,
        dropout: float = 0.0,
        variational: bool = False,
        layer_norm: bool = False,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        if attention not in ("additive", "dot"):
            raise ValueError(f"AttentionalLSTM: unknown attention {attention!r}; available: additive, dot")
        additive = attention == "additive"
        self.lstm = LSTM(input_size + hidden_size if input_feeding else input_size, hidden_size, num_layers)
        self.query = nn.Linear(hidden_size, attention_size, bias=False)
        self.key = nn.Linear(memory_size, attention_size, bias=additive)
        self.score = nn.Parameter(torch.empty(attention_size)) if additive else None
        self.layer_norm = nn.LayerNorm(attention_size) if layer_norm else None
        self.combine = nn.Linear(hidden_size + memory_size, hidden_size)
        self.scale = scale
        self.input_feeding = input_feeding
        self.residual = residual
        self.dropout = dropout
        self.variational = variational
        self.implementation = implementation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes ``score`` again; the submodules have methods of this name for their parameters."""
        if self.score is not None:
            _reset_score(self.score)

    def weights(self) -> AttentionalLSTMWeights:
        """Returns the weights in the form that `econmt_ops.attentional_lstm` takes."""
        layers = tuple(self.lstm.layer_weights(layer) for layer in range(self.lstm.num_layers))
        return AttentionalLSTMWeights(
            layers, self.query.weight, self.score, self.combine.weight, self.combine.bias
        )

    def forward(
        self,
        inputs: Tensor,
        memory: Tensor,
        state: AttentionalLSTMState | None = None,
        *,
        lengths: Tensor | None = None,
        keys: Tensor | None = None,
        dropout_seed: int | None = None,
    ) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
        """Runs the decoder over all time steps.

        Args:
            inputs: Inputs, (B, T, I).
            memory: Values that are attended to, (B, S, E).
            state: State returned by an earlier call; None for zeros.
            lengths: Numbers of valid memory positions, (B,) int64; None if every row has S positions.
            keys: ``self.key(memory)``, (B, S, A), for callers that run many single steps; None to compute it.
            dropout_seed: Seed of the dropout masks; None to draw one from torch's global generator.

        Returns:
            Outputs (B, T, H), attention weights (B, T, S) and the state after the last step.

        Raises:
            ValueError: If shapes or types do not fit.
        """
        read = self.lstm.input_size - (self.lstm.hidden_size if self.input_feeding else 0)
        check = Shapes("AttentionalLSTM", input_size=read, memory_size=self.key.in_features)
        check("inputs", inputs, "B T input_size")
        check("memory", memory, "B S memory_size")
        dropout, seed = seed_of(self, self.dropout, dropout_seed, inputs.device)
        return attentional_lstm(
            inputs,
            self.key(memory) if keys is None else keys,
            memory,
            self.weights(),
            lengths=lengths,
            state=state,
            input_feeding=self.input_feeding,
            residual=self.residual,
            dropout=dropout,
            dropout_seed=seed,
            variational=self.variational,
            layer_norm=_gain_and_bias(self.layer_norm),
            scale=self.scale,
            implementation=self.implementation,
        )


class LinearCrossEntropy(nn.Linear):
    """`torch.nn.Linear` followed by `torch.nn.CrossEntropyLoss`, without storing all logits.

    The parameters are those of `torch.nn.Linear`, initialized from U(-1 / sqrt(in_features), 1 / sqrt(in_features)).

    Args:
        in_features: H, number of input features.
        out_features: V, number of classes.
        bias: If False, the layer has no bias.
        label_smoothing, ignore_index, reduction, implementation: As of `econmt_ops.linear_cross_entropy`.
        device: Device of the parameters.
        dtype: Type of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.implementation = implementation

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits (..., V) of hidden (..., H)."""
        return functional.linear(hidden, self.weight, self.bias)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """Computes the loss.

        Args:
            hidden: Hidden states, (..., H).
            targets: Class of each hidden state, (...) int64.

        Returns:
            A scalar; with the reduction "none" a tensor of the shape of `targets`.

        Raises:
            ValueError: If the shape of `hidden` is not that of `targets` and H.
        """
        size = self.weight.shape[1]
        if hidden.shape != (*targets.shape, size):
            raise ValueError(
                f"LinearCrossEntropy: hidden must be (..., H) with H={size} and targets (...), "
                f"got {tuple(hidden.shape)} and {tuple(targets.shape)}"
            )
        loss = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            self.weight,
            targets.reshape(-1),
            bias=self.bias,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            implementation=self.implementation,
        )
        return loss.view(targets.shape) if self.reduction == "none" else loss


def _gain_and_bias(layer_norm: nn.LayerNorm | None) -> tuple[Tensor, Tensor] | None:
    return None if layer_norm is None else (layer_norm.weight, layer_norm.bias)


def _reset_score(score: Tensor) -> None:
    bound = 1.0 / math.sqrt(len(score))
    nn.init.uniform_(score, -bound, bound)
