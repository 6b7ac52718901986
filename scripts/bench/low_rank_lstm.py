"""Measurements of an LSTM layer with whole and with low-rank matrices, forward and backward.

Whole are torch's own LSTM and this package's recomputing one; of factors there is one pair a rank. All of one shape
take turns in one run. Before it is timed, each is held to the definition in float64, its matrices multiplied out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

import econmt_ops
from econmt.bench.rows import Row, Say, dtype_name, time_in_turns
from econmt.errors import EconmtError
from econmt_ops import LowRank, LowRankLSTMWeights, LSTMWeights
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.core.weights import AnyLSTMWeights, tensors_of
from econmt_ops.dispatch.rule import can_run
from econmt_ops.dispatch.traits import implementations_of
from scripts.bench.lstm_schedules import by_torch

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
    """Layer and how it is run: the row's name, the rank (0: whole), the implementation, and the weights."""

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

    def make(*size: int, scale: float) -> Tensor:
        return (torch.randn(size, device=device) * scale).to(dtype).requires_grad_()

    def factors(rank: int) -> LowRank:
        scale = hidden**-0.25 * rank**-0.25
        return LowRank(make(4 * hidden, rank, scale=scale), make(rank, hidden, scale=scale))

    lstms = [each for each in implementations_of("lstm").values() if can_run(each.traits, device.type, dtype)]
    own = [
        each.name for each in lstms if each.traits.recomputes and (has_compiler() or not each.traits.warms_up)
    ]
    whole = LSTMWeights(*(make(4 * hidden, *size, scale=hidden**-0.5) for size in ((hidden,), (hidden,), ())))
    found = [Way("whole: torch.nn.LSTM", 0, "torch", whole)]
    found += [Way(f"whole: econmt_ops, {name}", 0, name, whole) for name in own]
    for rank in ranks:
        thin = LowRankLSTMWeights(factors(rank), factors(rank), whole.bias)
        found += [Way(f"rank {rank}, {name}", rank, name, thin) for name in own]
    return found


def passes(way: Way, inputs: Tensor) -> dict[str, Callable[[], Any]]:
    """Returns the forward pass, which keeps nothing, and both passes with all gradients."""
    wanted = [inputs, *tensors_of(way.weights)]

    def forward() -> Tensor:
        with torch.no_grad():
            return way(inputs)

    def both() -> tuple[Tensor, ...]:
        outputs = way(inputs)
        return (outputs, *torch.autograd.grad(outputs, wanted, torch.ones_like(outputs)))

    return dict(zip(PASSES, (forward, both), strict=True))


def check(way: Way, inputs: Tensor) -> float:
    """Returns a layer's largest difference from the definition, relative to each tensor.

    Raises EconmtError if it is larger than rounding explains.
    """
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors_of(way.weights)]
    weights = exact
    if way.rank:
        weights = [exact[0] @ exact[1], exact[2] @ exact[3], exact[4]]
    read = inputs.detach().double().requires_grad_()
    outputs = by_torch(read, [LSTMWeights(*weights)])
    expected = [outputs, *torch.autograd.grad(outputs, [read, *exact], torch.ones_like(outputs))]
    run = passes(way, inputs)
    worst = 0.0
    for found, wanted in zip(
        [run["forward"](), *run["forward and backward"]()], [outputs, *expected], strict=True
    ):
        difference = (found.detach().double() - wanted.detach()).abs().max() / wanted.detach().abs().max()
        worst = max(worst, float(difference))
    allowed = _ALLOWED_TF32 if inputs.is_cuda and inputs.dtype == torch.float32 else _ALLOWED[inputs.dtype]
    if not worst <= allowed:
        raise EconmtError(
            f"bench low-rank: {way.name} lies {worst:.2g} from the definition, {allowed} is allowed"
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
    and the median call, and the gain over the fastest whole layer.
    """
    hidden, steps = shape
    numbers = count(1)
    for dtype in dtypes:
        for batch in batches:
            name = dtype_name(dtype)
            place = f"low-rank {next(numbers)} of {len(dtypes) * len(batches)}: batch {batch}, {name}"
            inputs = torch.randn(batch, steps, hidden, device=device).to(dtype).requires_grad_()
            found = ways(hidden, ranks, dtype, device)
            differences = {}
            for number, way in enumerate(found, 1):
                say(f"{place}, {way.name} ({number} of {len(found)})")
                differences[way.name] = check(way, inputs)
            say(f"{place}, timing in turns")
            timings = {
                what: time_in_turns({way.name: passes(way, inputs)[what] for way in found}, seconds, device)
                for what in PASSES
            }
            best = {
                what: min(min(timing[way.name].samples) for way in found if not way.rank)
                for what, timing in timings.items()
            }
            for way in found:
                row: Row = {"bench": "low-rank", "layer": way.name, "dtype": name, "batch": batch}
                row |= {"hidden": hidden, "steps": steps, "rank": way.rank, "parameters": way.parameters}
                for what, timing in timings.items():
                    quickest = min(timing[way.name].samples)
                    row[f"{what}, ms"] = 1e3 * quickest
                    row[f"{what}, median ms"] = 1e3 * timing[way.name].median
                    row[f"{what}, gain"] = best[what] / quickest
                yield {**row, "difference": differences[way.name]}
