#!/usr/bin/env python3
"""The persistent LSTM on a GPU: right, the same every time, and how fast beside cuDNN.

    python3 -m scripts.bench gpu.lstm            # under 150 seconds, compiling included
    python3 -m scripts.bench gpu.lstm 128x1024   # only these batches and sizes

First all kernels are compiled in many processes. Then forward passes and all gradients are held to float64, one walk is
repeated a thousand times, and layers are timed in CUDA graphs (T 100, medians of 15 replays), for a list of partitions
each. "us" are microseconds a step of the recurrence alone; "ms" are whole layers, products and gradients included. A
case that fails says so in a line, and the others go on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import TritonError

from econmt_ops import LSTMWeights
from econmt_ops.backends.triton import persistent
from econmt_ops.backends.triton.persistent import Partition, limits_of, plan
from econmt_ops.lstm import reference, triton

CUDA = torch.device("cuda")
STEPS = 100
SIZES = [(64, 512), (128, 512), (64, 1024), (128, 1024), (64, 256), (128, 256)]
WORKERS = 14
FAILURES = (RuntimeError, ValueError, AssertionError, TypeError, CompilationError, TritonError)

# Units, rows, warps, chunk, split, rows first, chunks ahead, team.
# fmt: off
FORWARD = {
    (64, 512): [(16, 16, 4, 512, 1, 0, 1, 1), (16, 16, 8, 256, 2, 0, 1, 1), (16, 16, 8, 64, 2, 0, 1, 1)],
    (128, 512): [(32, 16, 8, 512, 1, 0, 1, 1), (16, 32, 8, 256, 2, 0, 1, 1), (16, 32, 8, 128, 2, 0, 1, 1)],
    (64, 1024): [(16, 32, 8, 512, 2, 0, 1, 1), (16, 32, 8, 256, 2, 0, 1, 1)],
    (128, 1024): [(16, 64, 8, 128, 2, 0, 1, 1)],
    (64, 256): [(16, 16, 4, 256, 1, 0, 1, 1), (16, 16, 8, 128, 2, 0, 1, 1)],
    (128, 256): [(16, 16, 4, 256, 1, 0, 1, 1), (16, 16, 8, 128, 2, 0, 1, 1)],
}
BACKWARD = {
    (64, 512): [(32, 8, 4, 1024, 2, 0, 1, 1), (16, 16, 8, 512, 4, 0, 1, 2), (16, 16, 4, 512, 1, 0, 1, 4)],
    (128, 512): [(32, 16, 8, 512, 4, 0, 1, 1), (16, 32, 8, 512, 2, 0, 1, 2), (16, 32, 8, 256, 2, 0, 1, 4)],
    (64, 1024): [(16, 32, 8, 512, 2, 0, 1, 4), (16, 32, 8, 128, 2, 0, 1, 4), (16, 32, 8, 128, 4, 1, 1, 1)],
    (128, 1024): [(16, 64, 8, 128, 2, 0, 1, 4), (16, 64, 8, 64, 2, 0, 2, 4), (16, 64, 8, 128, 2, 1, 1, 4),
                  (16, 64, 8, 128, 2, 1, 1, 1), (16, 64, 8, 128, 2, 1, 1, 2)],
    (64, 256): [(16, 8, 4, 256, 4, 0, 1, 1), (32, 8, 4, 512, 2, 0, 1, 1)],
    (128, 256): [(32, 8, 4, 512, 2, 0, 1, 1), (16, 16, 4, 256, 4, 0, 1, 1)],
}
# fmt: on


def partitions(listed: list[tuple[int, ...]]) -> list[Partition]:
    """The partitions of a list, on this device."""
    programs = limits_of(CUDA).processors
    return [Partition(u, r, w, c, programs, s, bool(f), a, t) for u, r, w, c, s, f, a, t in listed]


# ---- right

CASES: list[dict[str, Any]] = [
    {"batch": 3, "steps": 4, "size": 7, "hidden": 5},
    {"batch": 17, "steps": 9, "size": 24, "hidden": 24, "lengths": True},
    {"batch": 17, "steps": 9, "size": 24, "hidden": 24, "lengths": True, "reverse": True, "state": True},
    {"batch": 1, "steps": 1, "size": 8, "hidden": 33},
    {"batch": 33, "steps": 7, "size": 64, "hidden": 100, "reverse": True, "layers": 2},
    {"batch": 40, "steps": 6, "size": 64, "hidden": 200, "state": True, "stash": "outputs", "lengths": True},
    {"batch": 64, "steps": 12, "size": 128, "hidden": 512, "stash": "cells"},
    {"batch": 100, "steps": 12, "size": 128, "hidden": 512, "lengths": True, "layers": 2},
    {"batch": 64, "steps": 5, "size": 64, "hidden": 768},
    {"batch": 64, "steps": 8, "size": 64, "hidden": 1024, "lengths": True},
    {"batch": 128, "steps": 8, "size": 64, "hidden": 1024},
    {"batch": 300, "steps": 5, "size": 64, "hidden": 512, "lengths": True, "reverse": True},
    {"batch": 64, "steps": 9, "size": 64, "hidden": 512, "both": True, "lengths": True},
    {"batch": 20, "steps": 9, "size": 64, "hidden": 48, "both": True, "lengths": True},
    {"batch": 64, "steps": 8, "size": 64, "hidden": 512, "dtype": torch.float16},
    {"batch": 64, "steps": 8, "size": 64, "hidden": 512, "dtype": torch.float32},
    {
        "batch": 17,
        "steps": 8,
        "size": 64,
        "hidden": 100,
        "dtype": torch.float32,
        "lengths": True,
        "reverse": True,
    },
    {
        "batch": 64,
        "steps": 9,
        "size": 64,
        "hidden": 256,
        "dtype": torch.float32,
        "both": True,
        "lengths": True,
    },
]


def weights(hidden: int, size: int) -> LSTMWeights:
    """Of a layer, float32."""
    scale = hidden**-0.5
    made = (
        torch.randn(4 * hidden, size) * size**-0.5,
        torch.randn(4 * hidden, hidden) * scale,
        torch.randn(4 * hidden) * scale,
    )
    return LSTMWeights(*(part.to(CUDA).requires_grad_() for part in made))


def leaves(*parts: Any) -> list[Tensor]:
    """The tensors in nested tuples."""
    return list(chain.from_iterable(leaves(*part) if isinstance(part, tuple) else [part] for part in parts))


def doubled(tree: Any) -> Any:
    """The same values in float64, each a leaf."""
    if isinstance(tree, Tensor):
        return tree.detach().double().requires_grad_()
    parts = [doubled(part) for part in tree]
    return LSTMWeights(*parts) if isinstance(tree, LSTMWeights) else tuple(parts)


def run_case(case: dict[str, Any], compare: bool = True) -> str:
    """The worst relative error, of outputs, states and every gradient, in the norm."""
    torch.manual_seed(1)
    batch, steps, size, hidden = (case[name] for name in ("batch", "steps", "size", "hidden"))
    dtype = case.get("dtype", torch.bfloat16)
    count = 2 if case.get("both") else case.get("layers", 1)
    stack = tuple(
        weights(hidden, hidden if number and not case.get("both") else size) for number in range(count)
    )
    inputs = torch.randn(batch, steps, size, device=CUDA).to(dtype).requires_grad_()
    lengths = None
    if case.get("lengths"):
        lengths = torch.randint(0, steps + 1, (batch,), generator=torch.Generator().manual_seed(2))
        lengths[0] = steps
    given = bool(case.get("state"))
    make = torch.randn if given else torch.zeros
    state = tuple(
        tuple(
            make(batch, hidden, device=CUDA).to(kind).requires_grad_(given) for kind in (dtype, torch.float32)
        )
        for _ in stack
    )
    options = {"lengths": lengths, "reverse": bool(case.get("reverse")), "residual": False}
    options |= {"dropout": 0.0, "dropout_seed": None, "variational": False}
    exact = doubled((inputs, stack, state))
    stash = case.get("stash", "gates")
    if case.get("both"):
        got = triton.bidirectional_lstm(inputs, *stack, lengths=lengths, stash=stash)
        want = reference.bidirectional_lstm(exact[0], *exact[1], lengths=lengths)
    else:
        got = triton.lstm(inputs, stack, state=state, from_zero=not given, stash=stash, **options)
        want = reference.lstm(exact[0], exact[1], state=exact[2], **options)
    results, rights = leaves(*got), leaves(*want)
    seeds = [torch.randn_like(part) for part in rights]
    own = [*leaves(inputs, stack), *(leaves(state) if given else [])]
    theirs = [*leaves(exact[0], exact[1]), *(leaves(exact[2]) if given else [])]
    if not compare:
        torch.autograd.grad(
            results, own, [seed.to(part.dtype) for seed, part in zip(seeds, results, strict=True)]
        )
        return ""
    results += torch.autograd.grad(
        results, own, [seed.to(part.dtype) for seed, part in zip(seeds, results, strict=True)]
    )
    rights += torch.autograd.grad(rights, theirs, seeds)
    errors = [
        float((a.detach().double() - b.detach()).norm() / (b.detach().norm() + 1e-6))
        for a, b in zip(results, rights, strict=True)
    ]
    limit = 3e-2 if dtype == torch.bfloat16 else 5e-3
    worst = max(errors) if all(error == error for error in errors) else float("nan")
    text = f"worst error {worst:.1e}"
    return text if worst < limit else f"WRONG: {text}, each {' '.join(f'{error:.0e}' for error in errors)}"


# ---- fast


class Walk:
    """A layer's recurrence alone, with random shares of the gates."""

    def __init__(self, batch: int, hidden: int, dtype: torch.dtype, steps: int = STEPS) -> None:
        torch.manual_seed(1)
        self.shares = torch.randn(1, steps, batch, 4 * hidden, device=CUDA).to(dtype)
        self.sums = self.shares.clone()
        self.recurrent = (torch.randn(1, 4 * hidden, hidden, device=CUDA) * hidden**-0.5).to(dtype)
        self.outputs = torch.zeros(steps, batch, hidden, device=CUDA, dtype=dtype)
        self.cells = torch.zeros(1, steps, batch, hidden, device=CUDA)
        self.doutputs = torch.randn_like(self.outputs)
        self.dsums = torch.zeros_like(self.sums)
        self.h = torch.zeros(1, batch, hidden, device=CUDA, dtype=dtype)
        self.c = torch.zeros(1, batch, hidden, device=CUDA)
        self.first_dc = torch.zeros_like(self.c)

    def forward(self, partition: Partition) -> None:
        """All steps."""
        persistent.walk_forward(
            partition, self.sums, self.recurrent, self.outputs, self.cells, None, (self.h, self.c), None, (False,),
            True,
        )  # fmt: skip

    def backward(self, partition: Partition) -> None:
        """All steps, back."""
        persistent.walk_backward(
            partition, self.sums, self.recurrent, self.cells, self.doutputs, self.dsums, self.h.zero_(),
            self.c.zero_(), self.first_dc, None, (False,),
        )  # fmt: skip

    def exact(self) -> tuple[Tensor, Tensor]:
        """Outputs and gradients of the sums in float32, by steps."""
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


def graph_time(function: Callable[[], object]) -> float:
    """Milliseconds of a replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(18):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del graph
    return sorted(times[3:])[7]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def time_partitions(batch: int, hidden: int) -> Iterator[str]:
    """Each partition's error and microseconds a step, forward and backward, bfloat16."""
    walk = Walk(batch, hidden, torch.bfloat16)
    outputs, dsums = walk.exact()
    limits = limits_of(CUDA)
    chosen = [plan(batch, hidden, torch.bfloat16, limits, back=back) for back in (False, True)]
    for back, listed in ((False, FORWARD), (True, BACKWARD)):
        tried = partitions(listed[batch, hidden])
        for each in dict.fromkeys([chosen[back], *tried]):
            if each is None:
                continue
            try:
                walk.sums.copy_(walk.shares)
                walk.forward(each if not back else chosen[False] or partitions(FORWARD[batch, hidden])[0])
                if back:
                    walk.backward(each)
                error = relative(walk.dsums[0], dsums) if back else relative(walk.outputs, outputs)
                used = graph_time(lambda: walk.backward(each) if back else walk.forward(each))  # noqa: B023
                mark = "*" if each == chosen[back] else " "
                way = "backward" if back else "forward "
                yield f" {mark}{way} {label(each)}: {1e3 * used / STEPS:6.2f} us, error {error:.1e}"
            except FAILURES as error:
                yield f"  {'backward' if back else 'forward '} {label(each)}: FAILED {brief(error)}"


def label(partition: Partition) -> str:
    u, r, w, c, _, s, f, a, t = partition
    order = ", rows first" if f else ""
    return f"{u:2} units x {r:2} rows, {w} warps, chunk {c:4} x {s}{order}, ahead {a}, teams of {t}"


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:160]}".replace("\n", " ")


def layer_times(batch: int, hidden: int, dtype: torch.dtype, layers: int = 1) -> tuple[float, float]:
    """Milliseconds of our layers, forward, and forward and backward."""
    torch.manual_seed(1)
    stack = tuple(weights(hidden, hidden) for _ in range(layers))
    inputs = torch.randn(batch, STEPS, hidden, device=CUDA).to(dtype).requires_grad_()
    given = torch.randn_like(inputs)
    zero = torch.zeros(batch, hidden, device=CUDA)
    state = tuple((zero.to(dtype), zero) for _ in stack)

    def forward() -> Tensor:
        return triton.lstm(
            inputs, stack, state=state, from_zero=True, lengths=None, reverse=False, residual=False, dropout=0.0,
            dropout_seed=None, variational=False,
        )[0]  # fmt: skip

    def alone() -> None:
        with torch.no_grad():
            forward()

    return graph_time(alone), graph_time(
        lambda: torch.autograd.grad(forward(), [inputs, *leaves(stack)], given)
    )


def cudnn_times(batch: int, hidden: int, dtype: torch.dtype, layers: int = 1) -> tuple[float, float]:
    """The same of torch.nn.LSTM."""
    module = torch.nn.LSTM(hidden, hidden, layers).to(CUDA, dtype)
    inputs = torch.randn(STEPS, batch, hidden, device=CUDA, dtype=dtype, requires_grad=True)
    given = torch.randn_like(inputs)

    def alone() -> None:
        with torch.no_grad():
            module(inputs)

    return graph_time(alone), graph_time(
        lambda: torch.autograd.grad(module(inputs)[0], [inputs, *module.parameters()], given)
    )


def attempt(text: str, function: Callable[..., tuple[float, float]], *arguments: Any) -> str:
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        forward, both = function(*arguments)
        return f"{text} {forward:.3f} / {both:.3f}"
    except FAILURES as error:
        return f"{text} FAILED {brief(error)}"


def time_layers(batch: int, hidden: int, layers: int = 1) -> str:
    """One line: ours and cuDNN's, forward and both passes."""
    parts = [attempt("ours bf16", layer_times, batch, hidden, torch.bfloat16, layers)]
    if layers == 1:
        parts += [attempt("fp16", layer_times, batch, hidden, torch.float16)]
        parts += [attempt("fp32 with fp16 products", layer_times, batch, hidden, torch.float32)]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", torch.float32)):
        parts.append(attempt(f"cuDNN {name}", cudnn_times, batch, hidden, dtype, layers))
    return f"ms forward / both: {'; '.join(parts)}"


def time_directions(batch: int, hidden: int) -> str:
    """Both directions of a layer, in one launch and one after the other."""
    ahead, back = weights(hidden, hidden), weights(hidden, hidden)
    inputs = torch.randn(batch, STEPS, hidden, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    given = torch.randn(batch, STEPS, 2 * hidden, device=CUDA, dtype=torch.bfloat16)
    parts = []
    for together in ("yes", "no"):

        def run(together: str = together) -> Tensor:
            return triton.bidirectional_lstm(inputs, ahead, back, lengths=None, together=together)[0]

        def times(run: Callable[[], Tensor] = run) -> tuple[float, float]:
            return graph_time(lambda: run()), graph_time(
                lambda: torch.autograd.grad(run(), [inputs, *leaves(ahead, back)], given)
            )

        parts.append(attempt(f"together={together}", times))
    return "; ".join(parts)


def repeat(batch: int = 64, hidden: int = 512, times: int = 1000) -> str:
    """Whether a walk forward and back gives the same bits every time."""
    walk = Walk(batch, hidden, torch.bfloat16)
    limits = limits_of(CUDA)
    ahead, back = (plan(batch, hidden, torch.bfloat16, limits, back=each) for each in (False, True))
    assert ahead is not None
    assert back is not None

    def once() -> None:
        walk.sums.copy_(walk.shares)
        walk.forward(ahead)
        walk.backward(back)

    once()
    outputs, dsums = walk.outputs.clone(), walk.dsums.clone()
    other = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(times):
        walk.outputs.zero_()
        walk.dsums.zero_()
        once()
        other += (walk.outputs != outputs).any() | (walk.dsums != dsums).any()
    return f"{times} times forward and back, B {batch}, H {hidden}: {int(other)} differ from the first"


# ---- the order of things


def jobs(sizes: list[tuple[int, int]]) -> list[Callable[[], object]]:
    """What compiles every kernel: each case, and each walk for two steps."""
    made: list[Callable[[], object]] = [lambda case=case: run_case(case, compare=False) for case in CASES]
    for batch, hidden in sizes:
        for back, listed in ((False, FORWARD), (True, BACKWARD)):
            for each in partitions(listed[batch, hidden]):

                def walk(
                    batch: int = batch, hidden: int = hidden, each: Partition = each, back: bool = back
                ) -> None:
                    walk = Walk(batch, hidden, torch.bfloat16, 2)
                    walk.backward(each) if back else walk.forward(each)

                made.append(walk)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):

            def layer(batch: int = batch, hidden: int = hidden, dtype: torch.dtype = dtype) -> None:
                global STEPS
                STEPS = 2
                layer_times(batch, hidden, dtype)

            made.append(layer)
    made += [lambda together=together: time_directions_once(together) for together in ("yes", "no")]
    return made


def time_directions_once(together: str) -> None:
    ahead, back = weights(512, 512), weights(512, 512)
    inputs = torch.randn(64, 2, 512, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    outputs = triton.bidirectional_lstm(inputs, ahead, back, lengths=None, together=together)[0]
    outputs.sum().backward()


def compile_share(number: int, sizes: list[tuple[int, int]]) -> None:
    """What one of the compiling processes does."""
    torch.backends.cuda.matmul.allow_tf32 = True
    for job in jobs(sizes)[number::WORKERS]:
        try:
            job()
            torch.cuda.synchronize()
        except FAILURES:  # it will be told when it is its turn
            if os.environ.get("BENCH_VERBOSE"):
                traceback.print_exc()


def compile_all(arguments: list[str]) -> None:
    """All kernels into Triton's cache, in many processes at once."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.gpu.lstm", "--compile", str(number), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL,
        )
        for number in range(WORKERS)
    ]
    deadline = time.monotonic() + 80
    for worker in workers:
        try:
            worker.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--compile"]:
        number, arguments = int(arguments[1]), arguments[2:]
        compile_share(number, sizes_of(arguments))
        return
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {text}", flush=True)

    sizes = sizes_of(arguments)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {limits_of(CUDA)}")
    compile_all(arguments)
    say("compiled")
    torch.backends.cuda.matmul.allow_tf32 = True
    for case in CASES:
        try:
            found = run_case(case)
        except FAILURES as error:
            found = f"FAILED {brief(error)}"
        told = " ".join(f"{name}={value}" for name, value in case.items())
        say(f"{found:24} {told}")
    try:
        say(repeat())
    except FAILURES as error:
        say(f"repeating FAILED {brief(error)}")
    for batch, hidden in sizes:
        say(f"B {batch}, H {hidden}: {time_layers(batch, hidden)}")
        for line in time_partitions(batch, hidden):
            print(line, flush=True)
    if (64, 512) in sizes:
        say(f"4 layers, B 64, H 512: {time_layers(64, 512, 4)}")
        say(f"both directions, B 64, H 512: {time_directions(64, 512)}")
        say(f"both directions, B 128, H 512: {time_directions(128, 512)}")
    say("done")


def sizes_of(arguments: list[str]) -> list[tuple[int, int]]:
    """The sizes named as 64x512, or all."""
    named = [tuple(int(part) for part in text.split("x")) for text in arguments]
    return [size for size in SIZES if not named or size in named]


if __name__ == "__main__":
    main(sys.argv[1:])
