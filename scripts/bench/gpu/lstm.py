#!/usr/bin/env python3
"""Times the persistent LSTM kernel against cuDNN.

    python -m scripts.bench gpu.lstm            # under 150 seconds, compiling included
    python -m scripts.bench gpu.lstm 128x1024   # only these batches and hidden sizes

All kernels are compiled in several processes first. Then outputs and all gradients are compared with float64, one walk
over the steps is repeated a thousand times, and layers of 100 steps are timed in CUDA graphs. "us" are microseconds a
step of the recurrence alone; "ms" are whole layers, products and gradients included. A case that fails prints a line,
and the next one follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from econmt_ops import LSTMWeights
from econmt_ops.core.stack import StackOptions
from econmt_ops.lstm import reference
from scripts.bench.gpu.frame import (
    DEVICE,
    FAILURES,
    arguments,
    brief,
    compiled_by_workers,
    heading,
    milliseconds,
    relative,
)

with suppress(ImportError):  # --help works without Triton
    from econmt_ops.backends.triton import persistent
    from econmt_ops.backends.triton.persistent import Partition, limits_of, plan
    from econmt_ops.lstm import triton

STEPS = 100
SIZES = ["64x512", "128x512", "64x1024", "128x1024", "64x256", "128x256"]
"""Batches and hidden sizes."""
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32 with fp16 products": torch.float32}
CASES = [
    "3x4x7x5", "17x9x24x24 lengths", "17x9x24x24 lengths reverse state", "1x1x8x33", "33x7x64x100 reverse layers",
    "40x6x64x200 state outputs lengths", "64x12x128x512 cells", "100x12x128x512 lengths layers", "64x5x64x768",
    "64x8x64x1024 lengths", "128x8x64x1024", "300x5x64x512 lengths reverse", "64x9x64x512 both lengths",
    "20x9x64x48 both lengths", "64x8x64x512 float16", "64x8x64x512 float32", "17x8x64x100 float32 lengths reverse",
    "64x9x64x256 float32 both lengths",
]  # fmt: skip
"""Batch, steps, input size and hidden size, and options: a stash, a type, "layers" (two) or "both" (directions)."""


def weights(hidden: int, size: int) -> LSTMWeights:
    """Makes the float32 weights of a layer."""
    scale = hidden**-0.5
    made = (
        torch.randn(4 * hidden, size) * size**-0.5,
        torch.randn(4 * hidden, hidden) * scale,
        torch.randn(4 * hidden) * scale,
    )
    return LSTMWeights(*(part.to(DEVICE).requires_grad_() for part in made))


def leaves(*parts: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples."""
    return list(chain.from_iterable(leaves(*part) if isinstance(part, tuple) else [part] for part in parts))


def doubled(tree: Any) -> Any:
    """Copies a nested tuple of tensors to float64 leaves."""
    if isinstance(tree, Tensor):
        return tree.detach().double().requires_grad_()
    parts = [doubled(part) for part in tree]
    return LSTMWeights(*parts) if isinstance(tree, LSTMWeights) else tuple(parts)


def run_case(case: str, compare: bool = True) -> str:
    """Runs a case; returns the largest relative error of outputs, states and all gradients."""
    torch.manual_seed(1)
    sizes, *flags = case.split()
    batch, steps, size, hidden = map(int, sizes.split("x"))
    dtype = next((getattr(torch, flag) for flag in flags if flag.startswith("float")), torch.bfloat16)
    stash = next((flag for flag in flags if flag in ("outputs", "cells")), "gates")
    both, has_state = "both" in flags, "state" in flags
    count = 2 if both or "layers" in flags else 1
    stack = tuple(weights(hidden, hidden if number and not both else size) for number in range(count))
    inputs = torch.randn(batch, steps, size, device=DEVICE).to(dtype).requires_grad_()
    lengths = None
    if "lengths" in flags:
        lengths = torch.randint(0, steps + 1, (batch,), generator=torch.Generator().manual_seed(2))
        lengths[0] = steps
    make = torch.randn if has_state else torch.zeros
    state = tuple(
        tuple(
            make(batch, hidden, device=DEVICE).to(kind).requires_grad_(has_state)
            for kind in (dtype, torch.float32)
        )
        for _ in stack
    )
    options = StackOptions(lengths, "reverse" in flags, from_zero=not has_state)
    exact = doubled((inputs, stack, state))
    if both:
        got = triton.bidirectional_lstm(inputs, *stack, lengths=lengths, stash=stash)
        want = reference.bidirectional_lstm(exact[0], *exact[1], lengths=lengths)
    else:
        got = triton.lstm(inputs, stack, state, options, stash=stash)
        want = reference.lstm(*exact, options)
    results, rights = leaves(*got), leaves(*want)
    seeds = [torch.randn_like(part) for part in rights]
    inputs_of_grad = [*leaves(inputs, stack), *(leaves(state) if has_state else [])]
    results += torch.autograd.grad(
        results, inputs_of_grad, [seed.to(part.dtype) for seed, part in zip(seeds, results, strict=True)]
    )
    if not compare:
        return ""
    exact_inputs = [*leaves(exact[0], exact[1]), *(leaves(exact[2]) if has_state else [])]
    rights += torch.autograd.grad(rights, exact_inputs, seeds)
    errors = [relative(a, b) for a, b in zip(results, rights, strict=True)]
    limit = 3e-2 if dtype == torch.bfloat16 else 5e-3
    worst = max(errors) if all(error == error for error in errors) else float("nan")
    text = f"worst error {worst:.1e}"
    return text if worst < limit else f"WRONG: {text}, each {' '.join(f'{error:.0e}' for error in errors)}"


class Walk:
    """Recurrence of a bfloat16 layer without its input products, with random input shares of the gates."""

    def __init__(self, batch: int, hidden: int, steps: int = STEPS) -> None:
        torch.manual_seed(1)
        dtype, limits = torch.bfloat16, limits_of(DEVICE)
        ahead, back = (plan(batch, hidden, dtype, limits, back=each) for each in (False, True))
        assert ahead is not None
        assert back is not None
        self.partitions: tuple[Partition, Partition] = ahead, back
        self.shares = torch.randn(1, steps, batch, 4 * hidden, device=DEVICE).to(dtype)
        self.sums = self.shares.clone()
        self.recurrent = (torch.randn(1, 4 * hidden, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
        self.outputs = torch.zeros(steps, batch, hidden, device=DEVICE, dtype=dtype)
        self.cells = torch.zeros(1, steps, batch, hidden, device=DEVICE)
        self.doutputs = torch.randn_like(self.outputs)
        self.dsums = torch.zeros_like(self.sums)
        self.h = torch.zeros(1, batch, hidden, device=DEVICE, dtype=dtype)
        self.c = torch.zeros(1, batch, hidden, device=DEVICE)
        self.first_dc = torch.zeros_like(self.c)
        partials = back.parts(hidden) * back.groups(batch), back.rows, back.team * back.units
        self.partials = torch.empty(partials, device=DEVICE)
        self.groups, count = persistent.counters_of(back, 1, batch, hidden)
        count = max(count, persistent.counters_of(ahead, 1, batch, hidden)[1])
        self.counters = torch.zeros(count, dtype=torch.int32, device=DEVICE)

    def forward(self) -> None:
        """Walks forward over all steps."""
        dtype, counters = self.sums.dtype, self.counters.zero_()
        kept = False, False, True, True
        launch, parts = persistent.forward_launch(
            self.partitions[0], tuple(self.sums.shape), (dtype,) * 3, (False,), kept
        )
        tensors = (
            self.sums, self.recurrent, self.outputs, self.outputs, self.cells, self.h, self.c, self.h, self.c, counters,
            counters,
        )  # fmt: skip
        for programs, *part in parts:
            launch(programs, tensors, (*self.sums.shape[1:3], *part))

    def backward(self) -> None:
        """Walks backward over all steps."""
        dtype, counters = self.sums.dtype, self.counters.zero_()
        launches, parts = persistent.backward_launch(
            self.partitions[1], tuple(self.sums.shape), (dtype,) * 4, (False,), (False, True, True)
        )
        tensors = (
            self.sums, self.recurrent, self.dsums, self.partials, self.cells, self.doutputs, self.dsums, self.h.zero_(),
            self.c.zero_(), self.first_dc, counters, counters,
        )  # fmt: skip
        ends = self.groups, len(counters)
        for programs, *part in parts:
            for launch in launches:
                launch(programs, tensors, (*self.sums.shape[1:3], *part, *ends), self.doutputs.stride()[:2])

    def both(self) -> None:
        """Walks forward from the first sums, then backward."""
        self.sums.copy_(self.shares)
        self.forward()
        self.backward()

    def exact(self) -> tuple[Tensor, Tensor]:
        """Computes outputs and gradients of the sums step by step in float32."""
        torch.backends.cuda.matmul.allow_tf32 = False
        shares = self.shares[0].float().requires_grad_()
        recurrent = self.recurrent[0].float()
        h = c = torch.zeros_like(self.c[0])
        made = []
        for share in shares:
            i, f, g, o = (share + h @ recurrent.t()).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            made.append(h)
        outputs = torch.stack(made)
        (dsums,) = torch.autograd.grad(outputs, shares, self.doutputs.float())
        return outputs.detach(), dsums


def time_walk(batch: int, hidden: int) -> Iterator[str]:
    """Yields microseconds a step and the error, forward and backward, in bfloat16."""
    try:
        walk = Walk(batch, hidden)
        outputs, dsums = walk.exact()
        walk.both()
        errors = relative(walk.outputs, outputs), relative(walk.dsums[0], dsums)
        for way, call, error, partition in zip(
            ("forward", "backward"), (walk.forward, walk.backward), errors, walk.partitions, strict=True
        ):
            used = milliseconds({way: call})[way]
            yield f"  {way:8} {partition}: {1e3 * used / STEPS:6.2f} us, error {error:.1e}"
    except FAILURES as error:
        yield f"  recurrence: {brief(error)}"


def passes(
    run: Callable[[], Tensor], wanted: list[Tensor], incoming: Tensor
) -> dict[str, Callable[[], object]]:
    """Returns the forward pass alone, which keeps nothing, and both passes with the gradients of ``wanted``."""
    return {"forward": torch.no_grad()(run), "both": lambda: torch.autograd.grad(run(), wanted, incoming)}


def layer(
    batch: int, hidden: int, dtype: torch.dtype, layers: int = 1, steps: int = STEPS
) -> dict[str, Callable[[], object]]:
    """Returns the passes of econmt's layers."""
    torch.manual_seed(1)
    stack = tuple(weights(hidden, hidden) for _ in range(layers))
    inputs = torch.randn(batch, steps, hidden, device=DEVICE).to(dtype).requires_grad_()
    zero = torch.zeros(batch, hidden, device=DEVICE)
    state = tuple((zero.to(dtype), zero) for _ in stack)

    def run() -> Tensor:
        return triton.lstm(inputs, stack, state, StackOptions(from_zero=True))[0]

    return passes(run, [inputs, *leaves(stack)], torch.randn_like(inputs))


def cudnn(
    batch: int, hidden: int, dtype: torch.dtype, layers: int = 1, steps: int = STEPS
) -> dict[str, Callable[[], object]]:
    """Returns the passes of torch.nn.LSTM, whose fastest layout has time first."""
    module = torch.nn.LSTM(hidden, hidden, layers).to(DEVICE, dtype)
    inputs = torch.randn(steps, batch, hidden, device=DEVICE, dtype=dtype, requires_grad=True)
    return passes(lambda: module(inputs)[0], [inputs, *module.parameters()], torch.randn_like(inputs))


def directions(batch: int, hidden: int, together: str, steps: int = STEPS) -> dict[str, Callable[[], object]]:
    """Returns the passes of a bidirectional layer, in one launch ("yes") or one direction after the other ("no")."""
    ahead, back = weights(hidden, hidden), weights(hidden, hidden)
    inputs = torch.randn(batch, steps, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def run() -> Tensor:
        return triton.bidirectional_lstm(inputs, ahead, back, lengths=None, together=together)[0]

    incoming = torch.randn(batch, steps, 2 * hidden, device=DEVICE, dtype=torch.bfloat16)
    return passes(run, [inputs, *leaves(ahead, back)], incoming)


def attempt(name: str, make: Callable[..., dict[str, Callable[[], object]]], *sizes: Any) -> str:
    """Returns the milliseconds of both passes in words."""
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        times = milliseconds(make(*sizes))
        return f"{name} {times['forward']:.3f} / {times['both']:.3f}"
    except FAILURES as error:
        return f"{name} {brief(error)}"


def time_layers(batch: int, hidden: int, layers: int = 1) -> str:
    """Returns a line with the times of econmt and cuDNN."""
    types = TYPES if layers == 1 else {"bf16": torch.bfloat16}
    parts = [attempt(f"ours {name}", layer, batch, hidden, dtype, layers) for name, dtype in types.items()]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", torch.float32)):
        parts.append(attempt(f"cuDNN {name}", cudnn, batch, hidden, dtype, layers))
    return f"ms forward / both: {'; '.join(parts)}"


def repeat(batch: int = 64, hidden: int = 512, times: int = 1000) -> str:
    """Counts the walks whose bits differ from those of the first."""
    walk = Walk(batch, hidden)
    walk.both()
    outputs, dsums = walk.outputs.clone(), walk.dsums.clone()
    other = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(times):
        walk.outputs.zero_()
        walk.dsums.zero_()
        walk.both()
        other += (walk.outputs != outputs).any() | (walk.dsums != dsums).any()
    return f"{times} times forward and back, B {batch}, H {hidden}: {int(other)} differ from the first"


def jobs(sizes: list[tuple[int, int]]) -> list[Callable[[], object]]:
    """Returns calls that compile every kernel: all cases, and walks and layers of two steps."""
    made: list[Callable[[], object]] = [partial(run_case, case, compare=False) for case in CASES]
    for batch, hidden in sizes:
        made.append(lambda batch=batch, hidden=hidden: Walk(batch, hidden, 2).both())
        made += [lambda sizes=(batch, hidden, each, 1, 2): layer(*sizes)["both"]() for each in TYPES.values()]
    return made + [lambda together=each: directions(64, 512, together, 2)["both"]() for each in ("yes", "no")]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("sizes", nargs="*", metavar="BATCHxHIDDEN", help=f"some of {', '.join(SIZES)}")
    given = parser.parse_args()
    sizes = [(int(b), int(h)) for b, h in (text.split("x") for text in given.sizes or SIZES)]
    torch.backends.cuda.matmul.allow_tf32 = True
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {text}", flush=True)

    if compiled_by_workers("gpu.lstm", given.compile, jobs(sizes)):
        return
    say(f"{heading()}, {limits_of(DEVICE)}; compiled")
    for case in CASES:
        try:
            say(f"{run_case(case):24} {case}")
        except FAILURES as error:
            say(f"{case}: {brief(error)}")
    try:
        say(repeat())
    except FAILURES as error:
        say(f"repeating: {brief(error)}")
    for batch, hidden in sizes:
        say(f"B {batch}, H {hidden}: {time_layers(batch, hidden)}")
        for line in time_walk(batch, hidden):
            print(line, flush=True)
    if (64, 512) in sizes:
        say(f"4 layers, B 64, H 512: {time_layers(64, 512, 4)}")
        for batch in (64, 128):
            parts = [attempt(f"together={each}", directions, batch, 512, each) for each in ("yes", "no")]
            say(f"both directions, B {batch}, H 512: {'; '.join(parts)}")


if __name__ == "__main__":
    main()
