"""Stacks of layers that run in one direction or in both, layer by layer where a single call of an op cannot.

D directions, L layers, B batch, T steps, H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from econmt_ops.core.weights import State
from econmt_ops.layers.op import OPS
from econmt_ops.lstm import bidirectional_lstm, lstm
from econmt_ops.products.stack import StackOptions, run_stack

Prepare = Callable[[Tensor, tuple[Any, ...]], tuple[Tensor, tuple[Any, ...]]]
"""Function that changes what a layer reads, (B, T, .), together with its weights."""


class StackedLayers:
    """Mixin of modules with layers in one direction or in both, whose parameters have the suffixes of `torch.nn`.

    Attributes:
        cell: Cell of the layers.
        implementation: "auto" or the name of an implementation.
    """

    cell: ClassVar[Any]
    num_layers: int
    bidirectional: bool
    implementation: str

    @property
    def op(self) -> Any:
        """Operation that runs the layers."""
        return OPS[self.cell.name]

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse") if self.bidirectional else (f"_l{layer}",)

    def _changed(self, *names: str) -> str:
        """Returns the settings among these that differ from their defaults, as `extra_repr` shows them."""
        return "".join(f", {name}={getattr(self, name)}" for name in names if getattr(self, name))

    def _weights(self, layer: int, reverse: bool = False) -> Any:
        """Returns the weights of one layer in one direction as the op takes them."""
        return self.layer_weights(layer, reverse)  # type: ignore[attr-defined]  # each module describes its own

    def _layers(self) -> tuple[tuple[Any, ...], ...]:
        """Returns for each layer, bottom first, the weights of its directions."""
        return tuple(
            tuple([self._weights(layer, bool(reverse)) for reverse in range(1 + self.bidirectional)])
            for layer in range(self.num_layers)
        )

    def _chosen(self) -> str:
        """Returns the implementation; "auto" is the reference, PyTorch's operators, where a program is exported."""
        # Not is_exporting(): to torch.compile that is True in torch 2.7.
        compiles = torch.compiler.is_compiling()
        is_exported = torch.compiler._is_exporting_flag if compiles else bool(torch._C._get_tracing_state())
        return "reference" if self.implementation == "auto" and is_exported else self.implementation

    def _run_layer(
        self, read: Tensor, weights: tuple[Any, ...], state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """Runs one layer; returns outputs (B, T, D H) and the states of each direction."""
        implementation = self._chosen()
        if state is None and self.op is lstm and len(weights) == 2:
            return bidirectional_lstm(read, *weights, lengths=lengths, implementation=implementation)
        results = [
            self.op(
                read,
                (part,),
                state=None if state is None else (state[reverse],),
                lengths=lengths,
                reverse=bool(reverse),
                implementation=implementation,
            )
            for reverse, part in enumerate(weights)
        ]
        outputs = [made for made, _ in results]
        last = tuple(after for _, (after,) in results)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), last

    def _run_layers(
        self, inputs: Tensor, state: State | None, options: StackOptions, prepare: Prepare | None = None
    ) -> tuple[Tensor, State]:
        """Runs the stack over a batch of sequences.

        Args:
            inputs: (B, T, I).
            state: Initial states, a tuple per layer and direction, (B, H) each, the directions of a layer one after the
                other; None for zeros.
            options: Lengths, dropout and residual sums. A dropout probability of 1 is allowed.
            prepare: Called for each layer before it runs.

        Returns:
            Outputs (B, T, D H) and the states after each row's last step, ordered as ``state``.

        Raises:
            ValueError: If the number of states does not fit.
        """
        layers, drops_all = self._layers(), options.dropout == 1.0
        directions = len(layers[0])
        if state is not None and len(state) != directions * len(layers):
            wanted = f"state must have {directions * len(layers)} entries, one per layer and direction"
            raise ValueError(f"{self.op.__name__}: {wanted}, got {len(state)}")
        if directions == 1 and prepare is None and not drops_all:
            return self.op(  # type: ignore[no-any-return]
                inputs,
                tuple(weights for (weights,) in layers),
                state=state,
                lengths=options.lengths,
                residual=options.residual,
                dropout=options.dropout,
                dropout_seed=options.seed,
                variational=options.variational,
                implementation=self._chosen(),
            )

        def run(layer: int, read: Tensor) -> tuple[Tensor, State]:
            first = None if state is None else state[directions * layer : directions * (layer + 1)]
            weights = layers[layer]
            if prepare is not None:
                read, weights = prepare(read, weights)
            return self._run_layer(read, weights, first, options.lengths)

        drop = (lambda read, _: torch.zeros_like(read)) if drops_all else None
        outputs, last = run_stack(run, inputs, len(layers), options, drop=drop)
        return outputs, tuple(itertools.chain.from_iterable(last))
