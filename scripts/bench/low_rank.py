"""``python -m scripts.bench low-rank``: times an LSTM layer with full and with low-rank matrices.

The full layers are torch.nn.LSTM and the recomputing ones of econmt_ops. All layers of a shape are timed in turns,
after each was compared with the definition in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

import econmt_ops
from econmt.bench.rows import Row, Say, dtype_name, time_in_turns
from econmt.cli.measuring import BenchSession, Dtypes, dtypes_of
from econmt.cli.option_groups import option, with_option_groups
from econmt.config import limits
from econmt.errors import EconmtError
from econmt_ops import LowRank, LowRankLSTMWeights, LSTMWeights
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.core.weights import AnyLSTMWeights, tensors_of
from econmt_ops.dispatch.rule import can_run
from econmt_ops.dispatch.traits import implementations_of
from scripts.bench.layers import Call, by_torch, largest_difference, lstm_weights, passes

PUBLISHED = (256, 100)
"""Hidden size and steps of the published comparison, 42.8 to 8.4 ms (Optim-LSTM)."""

BATCHES = [1, 16, 64]
RANKS = [8, 16, 32, 64, 128]
PASSES = ("forward", "forward and backward")
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""Largest difference from the definition, relative to a tensor's largest value."""
_ALLOWED_TF32 = 1e-2
"""Largest difference on a GPU, where cuDNN's LSTM computes float32 products in TF32."""


class Way(NamedTuple):
    """Layer to time: its name, the rank (0: full matrices), the implementation, and the weights."""

    name: str
    rank: int
    implementation: str
    weights: AnyLSTMWeights

    @property
    def parameters(self) -> int:
        """Number of values of the weights."""
        return sum(tensor.numel() for tensor in tensors_of(self.weights))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Returns the outputs (B, T, H) for inputs (B, T, H)."""
        if self.implementation == "torch":
            assert isinstance(self.weights, LSTMWeights)
            return by_torch(inputs, [self.weights])
        outputs, _ = econmt_ops.lstm(inputs, (self.weights,), implementation=self.implementation)
        return outputs


def ways(hidden: int, ranks: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Way]:
    """Returns the layers to time; low-rank layers have random factors whose product is as large as the matrix."""
    torch.manual_seed(1)

    def factors(rank: int) -> LowRank:
        shapes = (4 * hidden, rank), (rank, hidden)
        parts = (torch.randn(shape, device=device) * (hidden * rank) ** -0.25 for shape in shapes)
        return LowRank(*(part.to(dtype).requires_grad_() for part in parts))

    lstms = [each for each in implementations_of("lstm").values() if can_run(each.traits, device.type, dtype)]
    recomputing = [
        each.name for each in lstms if each.traits.recomputes and (has_compiler() or not each.traits.warms_up)
    ]
    full = lstm_weights(hidden, dtype, device)
    layers = [Way("full: torch.nn.LSTM", 0, "torch", full)]
    layers += [Way(f"full: econmt_ops, {name}", 0, name, full) for name in recomputing]
    for rank in ranks:
        thin = LowRankLSTMWeights(factors(rank), factors(rank), full.bias)
        layers += [Way(f"rank {rank}, {name}", rank, name, thin) for name in recomputing]
    return layers


def passes_of(way: Way, inputs: Tensor) -> dict[str, Call]:
    """Returns the forward pass, which keeps nothing, and both passes with all gradients."""
    both = passes(partial(way, inputs), [inputs, *tensors_of(way.weights)])
    return dict(zip(PASSES, both.values(), strict=True))


def check(way: Way, inputs: Tensor) -> float:
    """Returns a layer's largest difference from the definition, relative to each tensor.

    Raises EconmtError if it is larger than rounding explains.
    """
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors_of(way.weights)]
    weights = [exact[0] @ exact[1], exact[2] @ exact[3], exact[4]] if way.rank else exact
    read = inputs.detach().double().requires_grad_()
    expected = passes(lambda: by_torch(read, [LSTMWeights(*weights)]), [read, *exact])["both"]()
    forward, both = passes_of(way, inputs).values()
    worst = largest_difference([forward(), *both()], [expected[0], *expected])
    allowed = _ALLOWED_TF32 if inputs.is_cuda and inputs.dtype == torch.float32 else _ALLOWED[inputs.dtype]
    if not worst <= allowed:
        raise EconmtError(
            f"bench low-rank: {way.name} differs from the definition by {worst:.2g}; at most {allowed} is allowed"
        )
    return worst


def rows(
    shape: tuple[int, int],
    batches: Sequence[int],
    ranks: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    say: Say,
    *,
    seconds: float,
) -> Iterator[Row]:
    """Yields a row for each layer at each batch and type, timed in turns.

    ``shape`` is hidden size and steps, ``seconds`` those of each shape and pass. A row has the parameters, the fastest
    and the median call, and the gain over the fastest full layer.
    """
    hidden, steps = shape
    numbers = count(1)
    for dtype in dtypes:
        for batch in batches:
            name = dtype_name(dtype)
            progress = f"low-rank {next(numbers)} of {len(dtypes) * len(batches)}: batch {batch}, {name}"
            inputs = torch.randn(batch, steps, hidden, device=device).to(dtype).requires_grad_()
            layers = ways(hidden, ranks, dtype, device)
            differences = {}
            for number, way in enumerate(layers, 1):
                say(f"{progress}, {way.name} ({number} of {len(layers)})")
                differences[way.name] = check(way, inputs)
            say(f"{progress}, timing in turns")
            timings = {
                what: time_in_turns(
                    {way.name: passes_of(way, inputs)[what] for way in layers}, seconds, device
                )
                for what in PASSES
            }
            best = {
                what: min(min(timing[way.name].samples) for way in layers if not way.rank)
                for what, timing in timings.items()
            }
            for way in layers:
                row: Row = {"bench": "low-rank", "layer": way.name, "dtype": name, "batch": batch}
                row |= {"hidden": hidden, "steps": steps, "rank": way.rank, "parameters": way.parameters}
                for what, timing in timings.items():
                    quickest = min(timing[way.name].samples)
                    row[f"{what}, ms"] = 1e3 * quickest
                    row[f"{what}, median ms"] = 1e3 * timing[way.name].median
                    row[f"{what}, gain"] = best[what] / quickest
                yield {**row, "difference": differences[way.name]}


@with_option_groups
def low_rank_command(
    *,
    hidden: int = option(
        PUBLISHED[0], help="Number of units, and width of the inputs.", min=1, max=limits.WIDTH
    ),
    steps: int = option(PUBLISHED[1], help="Steps of a sequence.", min=1, max=limits.POSITIONS),
    batches: list[int] = option(
        BATCHES, "--batch", help="Number of sequences; may be repeated.", min=1, max=limits.BATCH
    ),
    ranks: list[int] = option(
        RANKS, "--rank", help="Rank of the factors; may be repeated.", min=1, max=limits.WIDTH
    ),
    dtypes: Dtypes = ["float32", "bfloat16"],  # noqa: B006  typer copies it
    seconds: Annotated[float, Field(ge=0.01, le=limits.SECONDS)] = option(
        3.0, help="Seconds for each batch, type and pass."
    ),
    session: BenchSession,
) -> None:
    """Time an LSTM layer with full matrices and with low-rank factors, forward and backward.

    \b
    Example:
      python -m scripts.bench low-rank
      python -m scripts.bench low-rank --batch 16 --csv low-rank.csv
    """
    types = dtypes_of(dtypes)
    with session.measuring() as say:
        measured = session.kept(
            rows((hidden, steps), batches, ranks, types, session.device, say, seconds=seconds)
        )
    title = f"LSTM of {hidden} units, {steps} steps; gain over the fastest full layer"
    columns = ("dtype", "batch", "layer", "parameters", *(f"{what}, ms" for what in PASSES))
    session.print(measured, (*columns, *(f"{what}, gain" for what in PASSES), "difference"), title)
    session.draw(measured, label=("dtype", "batch", "layer"), value="forward and backward, ms", title=title)
