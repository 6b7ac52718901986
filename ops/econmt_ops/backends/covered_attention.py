"""Additive attention with coverage, in PyTorch operators, on any device; see `econmt_ops.cells.coverage`.

Sizes: B batch, S source positions, A attention size, W width of the coverage, P numbers of each position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.attention import EagerAttention
from econmt_ops.backends.protocol import AttentionBackward, AttentionGradients, AttentionInputs, CoverageStep
from econmt_ops.cells.coverage import coverage_backward, coverage_forward
from econmt_ops.core.lengths import zero_padding
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import Coverage


class CoveredAttention(EagerAttention):
    """Attention whose keys contain the coverage's share at each step.

    Args:
        attention: Kernels of additive attention, whose keys are replaced at each step.
        inputs: Their inputs.
        coverage: Weights of the coverage, in the accumulate type.
    """

    def __init__(self, attention: EagerAttention, inputs: AttentionInputs, coverage: Coverage) -> None:
        assert inputs.score is not None
        self._attention, self._inputs = attention, inputs
        self._key = coverage.key
        self._padding = attention._padding
        self._coverage = coverage._replace(shares=zero_padding(coverage.shares, self._padding))
        self._exact = exact = accumulate_dtype(inputs.keys.dtype)
        self._factor = None if inputs.norm is not None else inputs.score.to(exact) * 4
        self._keys = inputs.keys
        self._sums: dict[str, Tensor] = {}

    def _take_keys(self, before: Tensor) -> None:
        """Gives the attention the keys of a step, given the coverage (B, S, W) before it."""
        self._attention.replace_keys(self._keys + torch.matmul(before, self._key.t()).to(self._keys.dtype))

    def forward(
        self, both: Tensor, outputs: Sequence[Tensor], weights: Tensor, coverage: CoverageStep | None = None
    ) -> None:
        """Implements `EagerAttention.forward`."""
        assert coverage is not None
        self._take_keys(coverage.before)
        self._attention.forward(both, outputs, weights)
        state = None if coverage.state is None else coverage.state.to(self._exact)
        after = coverage_forward(self._coverage, coverage.before, weights.to(self._exact), state)
        coverage.after.copy_(zero_padding(after, self._padding))

    def weights_of(self, queries: Tensor, coverage: Sequence[Tensor] | None = None) -> Tensor:
        """Implements `EagerAttention.weights_of`."""
        assert coverage is not None
        made = []
        for step, query in enumerate(queries):
            self._take_keys(coverage[step])
            made.append(self._attention.weights_of(query.unsqueeze(0)))
        return torch.cat(made)

    def backward(self, step: AttentionBackward) -> None:
        """Implements `EagerAttention.backward`, for one step."""
        assert step.coverage is not None
        assert step.dcoverage is not None
        before, after, state = step.coverage
        state = None if state is None else state.to(self._exact)
        attended, dafter = step.weights.to(self._exact), zero_padding(step.dcoverage, self._padding)
        made = coverage_backward(self._coverage, before, after, attended, state, dafter)
        total = made.attention if step.dweights is None else made.attention + step.dweights
        self._take_keys(before)
        sums = self._attention.sums.keys.zero_()
        self._attention.backward(step._replace(dweights=total, coverage=None))
        dkeys = sums if self._factor is None else sums * self._factor
        step.dcoverage.copy_(made.coverage + torch.matmul(dkeys, self._key))
        if step.dstate is not None and made.state is not None:
            step.dstate.copy_(made.state)
        steps = {
            "keys": dkeys,
            "coverage_key": torch.einsum("bsa,bsw->aw", dkeys, before),
            "coverage_shares": made.shares,
            "coverage_attention": made.weight,
            "coverage_recurrent": made.recurrent,
        }
        for name, part in steps.items():
            if part is None:
                continue
            if name in self._sums:
                self._sums[name] += part
            else:
                self._sums[name] = part.clone()

    def coverage_gradients(self) -> dict[str, Tensor]:
        """Implements `EagerAttention.coverage_gradients`."""
        return {name: total for name, total in self._sums.items() if name != "keys"}

    def projected_gradient(self, weights: Tensor, da: Tensor) -> Tensor:
        """Implements `EagerAttention.projected_gradient`."""
        return self._attention.projected_gradient(weights, da)

    def gradients(self, queries: Tensor, dscores: Tensor) -> AttentionGradients:  # noqa: ARG002 - summed already
        """Implements `EagerAttention.gradients`."""
        return self._attention.sums._replace(keys=self._sums["keys"])
