"""Blocks of steps of the recomputing attentional LSTM by one kernel launch each.

`econmt_ops.backends.cuda.decoder` says which devices and sizes have such kernels. All other calls run step by step, as
in `forward` and `backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt_ops.attentional_lstm.block import BackwardTensors, Block, BottomGates, LSTMBlock, ShareGradients
from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result
from econmt_ops.backends.attention import EagerAttention
from econmt_ops.backends.cuda import decoder
from econmt_ops.core.chunks import reaches
from econmt_ops.core.precision import matmul_tf32
from econmt_ops.dispatch.rule import MODE


def sizes_of(problem: AttentionalProblem) -> decoder.DecoderSizes | None:
    """Returns the sizes of a call whose blocks can run in one launch each; None: they run step by step."""
    call = problem.call
    if (
        call.backend != "triton"
        or not problem.is_lstm
        or not problem.squashes
        or call.first_coverage is not None
        or MODE.device is not None
        or type(call.inputs) is not Tensor
        or call.query is None
        or call.score is None
        or call.norm
        or reaches(call.stash, "cells")
        or (problem.dtype == torch.float32 and not (call.tf32 and matmul_tf32()))
        or not all(isinstance(layer.hidden, Tensor) for layer in problem.layers)
    ):
        return None
    sizes = decoder.DecoderSizes(
        problem.dtype,
        problem.hidden,
        problem.size,
        len(problem.layers),
        call.keys.shape[1],
        problem.batch,
        any(mask is not None for mask in problem.masks),
        call.residual and len(problem.layers) > 1,
    )
    return sizes if decoder.serves(sizes, call.inputs.device) else None


def _narrowed(problem: AttentionalProblem) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns the weights of the kernels in float16: of the layers, ``both``, and their ``units``."""
    from econmt_ops.backends.triton.units import units_of

    hidden, layers, query = problem.hidden, problem.layers, problem.query
    assert isinstance(problem.from_output, Tensor)
    assert query is not None
    # Whole matrices, which one launch reads, are as good a bound as the parts that are multiplied here.
    whole = [part for layer in layers for part in (layer.input, layer.hidden)] + [query, problem.combine]
    largest = torch.stack(torch._foreach_norm(whole, torch.inf))
    units = units_of(largest.view(-1, 2).amax(1))
    weights = []
    for number, layer in enumerate(layers):
        unit = units[number : number + 1]
        weights.append(query.new_empty(4 * hidden, 2 * hidden, dtype=torch.float16))
        read = problem.from_output if number == 0 else layer.input
        torch.div(read, unit, out=weights[-1][:, :hidden])
        torch.div(layer.hidden, unit, out=weights[-1][:, hidden:])
    both = query.new_empty(len(query) + hidden, hidden, dtype=torch.float16)
    torch.div(query, units[-1], out=both[: len(query)])
    torch.div(problem.from_top, units[-1], out=both[len(query) :])
    return weights, both, units


class _DecoderBlocks:
    """Tensors and options that both passes hand to the kernels in every block.

    Attributes:
        tensors: Fields of both kernels' arguments, see `decoder.run`; in the compute type, or float16 for float32.
    """

    def __init__(
        self, problem: AttentionalProblem, sizes: decoder.DecoderSizes, attention: EagerAttention
    ) -> None:
        from econmt_ops.backends.triton.attention import TritonAttention

        self.problem, self.sizes = problem, sizes
        call = problem.call
        assert isinstance(attention, TritonAttention)
        self.tensors: dict[str, Any] = {}
        if problem.dtype == torch.float32:
            weights, both, of_weights = _narrowed(problem)
            self.tensors["units"] = of_weights
            self.tensors |= {"key_units": attention.key_units, "projected_units": attention.value_units}
        else:
            weights, both = [], decoder.aligned(problem.both().contiguous())
            for layer in range(sizes.layers):
                weight = problem.joint(layer)
                assert isinstance(weight, Tensor)
                weights.append(decoder.aligned(weight))
        assert call.score is not None
        self.tensors |= {
            "weights": weights,
            "both": both,
            "score": decoder.aligned(call.score.to(problem.dtype).contiguous()),
            "keys": decoder.aligned(attention.keys),
            "projected": attention.values,
            "lengths": None if call.lengths is None else call.lengths.to(call.keys.device).contiguous(),
        }

    def mask(self, begin: int, end: int) -> Tensor | None:
        """Returns the mask (K, B, H) of the upper layer's input."""
        return self.problem.mask(self.sizes.layers - 1, begin, end) if self.sizes.masked else None


class ForwardBlocks(_DecoderBlocks):
    """Steps of a forward pass; ``last_h`` and ``last_c`` of the result are those after the steps that have run."""

    def __init__(
        self, problem: AttentionalProblem, sizes: decoder.DecoderSizes, result: Result, keep: bool
    ) -> None:
        super().__init__(problem, sizes, problem.attention(problem.projected()))
        self._result, self.others = result, result.last_c
        self._bottom = BottomGates(problem, result, keep)
        for layer in range(sizes.layers):
            result.last_h[layer] = problem.call.first_h[layer]
            result.last_c[layer] = problem.call.first_c[layer]

    def run(self, begin: int, end: int) -> None:
        """Runs steps begin to end."""
        problem, result = self.problem, self._result
        first = result.outputs[begin - 1] if begin else problem.call.first_output.to(problem.dtype)
        decoder.run(
            "forward",
            self.sizes,
            **self.tensors,
            sums=self._bottom(begin, end),
            bias=decoder.aligned(problem.layers[1].read_bias) if self.sizes.layers > 1 else None,
            combine_bias=decoder.aligned(problem.combine_bias),
            first_output=decoder.aligned(first.contiguous()),
            outputs=result.outputs[begin:end],
            attention=result.attention[begin:end],
            h=[h[begin:end] for h in result.h] if result.h.shape[1] else [],
            state_h=result.last_h,
            state_c=self.others,
            mask=self.mask(begin, end),
            scale=problem.scale,
        )

    def finish(self) -> None:
        """Ends the pass; the state is already where it belongs."""


class BackwardBlocks(_DecoderBlocks):
    """Steps of a backward pass.

    Attributes:
        dh: (L, B, H), do: (B, H), gradients of h and o before the last step that has run.
        dbias: (groups of rows, L, 4H) float32, sums of the gates' gradients.
    """

    extra: tuple[Tensor, ...] = ()
    dnorm: tuple[Tensor, ...] = ()

    def __init__(self, tensors: BackwardTensors, sizes: decoder.DecoderSizes) -> None:
        super().__init__(tensors.problem, sizes, tensors.attention)
        self._pass = tensors
        space, shape = tensors.stash.outputs.new_zeros, tensors.stash.outputs.shape[1:]
        self.dh, self.do = space(sizes.layers, *shape), space(*shape)
        self.dbias = space(sizes.groups, sizes.layers, 4 * sizes.hidden, dtype=torch.float32)
        if tensors.last_dh is not None:
            self.dh.copy_(tensors.last_dh)

    def run(self, block: Block, contexts: Tensor, dcontexts: Tensor) -> ShareGradients:
        """Runs the steps of a block as `BackwardSteps.run` does."""
        assert isinstance(block, LSTMBlock)
        steps = slice(block.begin, block.end)
        queries, da = torch.empty_like(block.query), decoder.aligned(dcontexts)
        decoder.run(
            "backward",
            self.sizes,
            **self.tensors,
            query=block.query,
            context=contexts,
            outputs=self._pass.stash.outputs[steps],
            attention=self._pass.weights[steps],
            doutputs=None if self._pass.doutputs is None else decoder.aligned(self._pass.doutputs[steps]),
            gates=block.gates,
            cells=[cells for cells in block.cells if isinstance(cells, Tensor)],
            dgates=block.dreads,
            dquery=queries,
            da=da,
            dscores=self._pass.dscores[steps],
            state_do=self.do,
            state_dh=self.dh,
            state_dc=self._pass.dothers,
            dbias=self.dbias,
            mask=self.mask(block.begin, block.end),
            scale=self.problem.scale,
        )
        if da is not dcontexts:  # memory of the caller, which begins anywhere
            dcontexts.copy_(da)
        return ShareGradients(queries, dcontexts, None)
