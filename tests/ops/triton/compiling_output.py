"""Launches for `compiling`: of the output layer, of dropout, look-ups, reversal, of a layer and of searches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from econmt_ops.backends.protocol import AttentionBackward, AttentionInputs, CoverageStep, OutputStep
from econmt_ops.backends.triton import (
    beam,
    cross_entropy,
    embedding,
    layer_kernels,
    persistent,
    random,
    reversal,
    sliced_cross_entropy,
    units,
)
from econmt_ops.backends.triton import decoder_output as decoder_output_kernels
from econmt_ops.backends.triton.covered_attention import TritonCoveredAttention
from econmt_ops.core.weights import Coverage
from econmt_ops.dispatch.rule import rules_only
from econmt_ops.lstm.persistent_operands import LayerSettings, OperandMaker


def losses(dtype: torch.dtype, vocabulary: int) -> None:
    """With label smoothing and gradients; rows as `losses_by_chunks` pads them."""
    stride = -(-vocabulary // 64) * 64
    logits, values = torch.zeros(2, stride, dtype=dtype), torch.zeros(2)
    targets = torch.zeros(2, dtype=torch.int64)
    cross_entropy.make_losses(logits, vocabulary, targets, values, None, 0.1, -100, True)


def scaling() -> None:
    """Of the gradient of a loss."""
    cross_entropy.scale(torch.zeros(9000, dtype=torch.bfloat16), torch.ones(()))


def slices(end: bool) -> None:
    """The first of its kernels, or the second."""
    logits, targets = torch.zeros(2, 16_640, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    labels = sliced_cross_entropy.Labels(targets, 0, 33_278, 16_639, 0.1, -100)
    if not end:
        sliced_cross_entropy.slice_numbers_of(logits, 16_639, targets, labels)
        return
    numbers, losses = torch.zeros(2, 3, 2), torch.zeros(2)
    sliced_cross_entropy.put_slice_gradient(logits, 16_639, targets, numbers, labels, torch.ones(()), losses)


def cell_states() -> None:
    """Of an LSTM that walks backwards over rows of different lengths."""
    sums, states = torch.zeros(1, 3, 5, 256, dtype=torch.bfloat16), torch.zeros(1, 3, 5, 64)
    persistent.walk_cells(sums, states[:, 0], states, torch.ones(5, dtype=torch.int64), (True,))


def layer(name: str) -> None:
    """What a layer of 512 units in bfloat16 launches beside its walk, with float32 weights and lengths."""
    values, workspace = torch.zeros(8, 16, 512), torch.zeros(4096, dtype=torch.int32)
    with rules_only("cuda"):
        if name == "operands":
            bfloat16, shape = torch.bfloat16, torch.Size((8, 16, 500))
            maker = OperandMaker(
                LayerSettings(bfloat16, bfloat16, "gates", (False,)),
                (shape, torch.float32),
                (torch.float32,) * 4,
                512,
            )
            weights = torch.zeros(2048, 500), torch.zeros(2048, 512), torch.zeros(2048), torch.zeros(2048)
            maker(torch.zeros(shape), None, weights, (4096, 64), True, torch.ones(16, dtype=torch.int64))
        else:
            layer_kernels.column_sums(values.view(128, 512), torch.zeros(512), workspace, 0, 64)


def decoder_output() -> None:
    """Of a decoder with a context gate and layer normalisation."""
    values, vector = torch.zeros(2, 512, dtype=torch.bfloat16), torch.zeros(512)
    wide, sums = torch.zeros(2, 1024, dtype=torch.bfloat16), torch.zeros(2, 512)
    step = OutputStep(wide, wide, values, vector, (vector, vector))
    decoder_output_kernels.forward(step, [values, values])
    decoder_output_kernels.backward(step, [values, values], wide, wide, [sums, sums])


def coverage() -> None:
    """A step of attention with a coverage of gated units, forward and backward."""
    rows, places, width = 2, 16, 8
    keys, vector = torch.zeros(rows, places, 512, dtype=torch.bfloat16), torch.zeros(512)
    inputs = AttentionInputs(keys, keys, vector, (vector, vector), 1.0, torch.full((rows,), places), True)
    shares, recurrent = torch.zeros(rows, places, 3 * width), torch.zeros(3 * width, width)
    weights = Coverage("gru", torch.zeros(512, width), shares, torch.zeros(3 * width), recurrent=recurrent)
    attention = TritonCoveredAttention(inputs, weights)
    covered, state = torch.zeros(rows, places, width), torch.zeros(rows, 3 * width)
    both, output = torch.zeros(rows, 1024, dtype=torch.bfloat16), torch.zeros(rows, 512, dtype=torch.bfloat16)
    shares, step = torch.zeros(rows, places), CoverageStep(covered, covered, state)
    attention.forward(both, [output, output], shares, step)
    attention.backward(
        AttentionBackward(output, output, shares, output, [output], None, both, shares, step, covered, state)
    )


def search() -> None:
    """A step of a beam of five among 32,000 words, for three sentences."""
    count, exact = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.float64)
    places = torch.zeros(3, 5, dtype=torch.int64)
    ended, grown = torch.zeros(3, 6, 2, dtype=torch.float64), torch.zeros(3, 20, 5, dtype=torch.int64)
    beam.advance(
        torch.zeros(15, 32_000), exact, count, count, count, exact[0], exact, ended, grown, places, places,
        masked=(0, 1), end=2,
    )  # fmt: skip


def launches() -> dict[str, Callable[[], object]]:
    """Launches by name."""
    rows = torch.zeros(2, 16, 512, dtype=torch.bfloat16)
    seed = torch.zeros((), dtype=torch.int64)
    return {
        "losses bfloat16": lambda: losses(torch.bfloat16, 32_000),
        "losses float32": lambda: losses(torch.float32, 32_000),
        "losses of an odd vocabulary": lambda: losses(torch.bfloat16, 7709),
        "numbers of a slice": lambda: slices(False),
        "gradient of a slice": lambda: slices(True),
        "scaling": scaling,
        "mask": lambda: random.keep_mask(1 << 20, seed, 1, 50_000),
        "dropout bfloat16": lambda: random.dropout(rows, seed, 1, 50_000, 1.25, False),
        "dropout float32": lambda: random.dropout(rows.float(), seed, 1, 50_000, 1.25, True),
        "look-up": lambda: embedding.gradient(rows.float(), torch.zeros(2, 16, dtype=torch.int64), 32_000, 0),
        "cell states": cell_states,
        "table": lambda: embedding.look_up(
            rows.view(-1, 512), torch.zeros(2, 16, dtype=torch.int64), torch.bfloat16
        ),
        "operands": lambda: layer("operands"),
        "sums": lambda: layer("sums"),
        "decoder output": decoder_output,
        "coverage": coverage,
        "search": search,
        "units": lambda: units.in_units(rows.float()),
        "reversal": lambda: reversal.reverse(rows, torch.zeros(2, dtype=torch.int64)),
    }
