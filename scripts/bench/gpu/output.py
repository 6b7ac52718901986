"""Times the output layer, the optimizer, dropout and look-ups on a GPU, each checked against float64 first.

    python -m scripts.bench gpu.output [PART ...]    parts: checks output kernel optimizer dropout lookup; none: all

Everything is captured in a CUDA graph, forward and backward, and timed by events over replays; the peak is what is
allocated beyond what was there before. A case that fails says so and the next one follows. Under a minute in all.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from triton import TritonError

from econmt_ops.backends.triton import cross_entropy, random
from econmt_ops.core.dropout import SeedCounter, dropout, keep_threshold
from econmt_ops.core.lengths import reverse_rows
from econmt_ops.core.look_up import look_up
from econmt_ops.linear_cross_entropy import recompute
from econmt_ops.linear_cross_entropy.triton import linear_cross_entropy
from econmt_ops.optimizer import FusedOptimizer

FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, TritonError)
MEBI = 1 << 20
DEVICE = torch.device("cuda")
SIZES = ((6400, 512, 32_000), (12_800, 512, 7709), (12_800, 512, 17_191))
CHUNKS = (16, 32, 64, 128)


@contextmanager
def case(name: str) -> Iterator[None]:
    """Says why a case fails, and goes on."""
    try:
        yield
    except FAILURES as error:
        print(f"{name}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)


def timed(function: Callable[[], Any], replays: int = 10) -> tuple[float, float]:
    """Milliseconds of a call in a graph, the median of replays, and MiB that an eager call allocates at its peak."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / MEBI
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    new = functools.partial(torch.cuda.Event, enable_timing=True)
    events = [new() for _ in range(replays + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))
    return times[len(times) // 2], peak


def layer(
    rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden in the compute type, weight and bias in float32, and targets a tenth of which do not count."""
    draw = torch.Generator(DEVICE).manual_seed(1)
    new = functools.partial(torch.randn, generator=draw, device=DEVICE)
    targets = torch.randint(vocabulary, (rows,), generator=draw, device=DEVICE)
    targets[::10] = -100
    return (
        new(rows, hidden).to(dtype).requires_grad_(),
        new(vocabulary, hidden).mul_(0.05).requires_grad_(),
        targets,
        new(vocabulary).requires_grad_() if bias else None,
    )


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    smoothing: float,
    softmax: torch.dtype,
) -> Tensor:
    """torch's layer and loss, the softmax in its own type."""
    bias = None if bias is None else bias.to(hidden.dtype)
    logits = functional.linear(hidden, weight.to(hidden.dtype), bias).to(softmax)
    return functional.cross_entropy(logits, targets, label_smoothing=smoothing)


def gradients(loss: Callable[..., Tensor], own: tuple[Any, ...], **options: Any) -> list[Tensor]:
    """The loss and its gradients."""
    value = loss(*own, **options)
    leaves = [tensor for tensor in own if tensor is not None and tensor.requires_grad]
    return [value.detach(), *torch.autograd.grad(value * 0.5, leaves)]


def by(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An implementation of the op with the arguments of `plain`."""

    def loss(
        hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, smoothing: float
    ) -> Tensor:
        return function(
            hidden,
            weight,
            targets,
            bias=bias,
            label_smoothing=smoothing,
            ignore_index=-100,
            reduction="mean",
        )

    return loss


def checks() -> None:
    """The largest error of loss and gradients relative to float64, of torch beside it."""
    for dtype, sizes in (
        (d, s) for d in (torch.float32, torch.bfloat16, torch.float16) for s in (1003, 7709)
    ):
        name = f"check {str(dtype)[6:]} 700 x 128 x {sizes}"
        with case(name):
            own = layer(700, 128, sizes, dtype)
            hidden, weight, targets, bias = own
            assert bias is not None
            exact = tuple(
                tensor.detach().to(dtype).double().requires_grad_() for tensor in (hidden, weight, bias)
            )
            expected = gradients(
                plain, (exact[0], exact[1], targets, exact[2]), smoothing=0.1, softmax=torch.float64
            )
            losses: dict[str, Callable[..., Tensor]] = {
                "triton": by(linear_cross_entropy),
                "torch": functools.partial(plain, softmax=torch.float32),
            }
            for kind, loss in losses.items():
                found, again = (gradients(loss, own, smoothing=0.1) for _ in range(2))
                errors = [
                    f"{float((a.double() - b).abs().max() / b.abs().max()):.1e}"
                    for a, b in zip(found, expected, strict=True)
                ]
                same = all(a.equal(b) for a, b in zip(found, again, strict=True))
                print(
                    f"{name:34} {kind:7} loss, dh, dW, db {' '.join(errors)}, repeats equal: {same}",
                    flush=True,
                )


def output() -> None:
    """Forward and backward of the output layer: milliseconds and MiB."""
    print("output layer, forward + backward in a graph: ms / MiB at the peak beyond what is given")
    heads = ["torch 16", "torch 32", "recompute", *(f"triton {chunk} MiB" for chunk in CHUNKS)]
    print(" " * 38 + "".join(f"{head:>17}" for head in heads))
    for dtype, smoothing, size in (
        (d, s, n) for n in SIZES for d in (torch.bfloat16, torch.float32) for s in (0.0, 0.1)
    ):
        own = layer(*size, dtype, bias=False)
        calls: list[tuple[Callable[..., Tensor], int]] = [
            (functools.partial(plain, softmax=dtype), 0),
            (functools.partial(plain, softmax=torch.float32), 0),
            (by(recompute.linear_cross_entropy), 0),
            *((by(linear_cross_entropy), chunk) for chunk in CHUNKS),
        ]
        cells = []
        for call, chunk in calls:
            before, cross_entropy.CHUNK_BYTES = cross_entropy.CHUNK_BYTES, chunk * MEBI or MEBI
            cells.append("failed")
            with case(f"{size} {dtype} {chunk}"):
                own_step = functools.partial(gradients, call, own, smoothing=smoothing)
                milliseconds, peak = timed(own_step, 7 if dtype == torch.bfloat16 else 3)
                cells[-1] = f"{milliseconds:8.3f} /{peak:7.0f}"
            cross_entropy.CHUNK_BYTES = before
        name = f"{' x '.join(map(str, size))} {str(dtype)[6:]} smoothing {smoothing}"
        print(f"{name:38}" + "".join(f"{cell:>17}" for cell in cells), flush=True)


def kernel() -> None:
    """The kernel between the products alone, for a chunk that is in the cache and one that is not."""
    print("the loss kernel: us, TB/s of two readings and a writing, by warps and values at once")
    targets = torch.randint(7000, (4096,), device=DEVICE)
    losses = torch.empty(4096, device=DEVICE)
    for rows, vocabulary, dtype in (
        (512, 32_000, torch.bfloat16),
        (2048, 32_000, torch.bfloat16),
        (2048, 7744, torch.bfloat16),
        (256, 32_000, torch.float32),
    ):
        cells = []
        for warps, values in ((4, 2048), (4, 4096), (8, 4096), (8, 8192), (16, 8192)):
            before = cross_entropy._WARPS, cross_entropy._VALUES
            cross_entropy._WARPS, cross_entropy._VALUES = warps, values
            with case(f"{rows} {vocabulary} {warps} {values}"):
                logits = torch.randn(rows, vocabulary, device=DEVICE).to(dtype)
                arguments = (logits, vocabulary, targets[:rows], losses[:rows], None, 0.1, -100, True)
                milliseconds, _ = timed(functools.partial(cross_entropy._make_losses, *arguments), 20)
                rate = 3 * logits.nbytes / milliseconds / 1e9
                cells.append(f"{warps:2} x {values}: {1e3 * milliseconds:6.1f} {rate:4.1f}")
            cross_entropy._WARPS, cross_entropy._VALUES = before
        print(f"{rows:5} x {vocabulary} {str(dtype)[6:]:9} " + "  ".join(cells), flush=True)


def kernels_of(function: Callable[[], Any]) -> str:
    """How many kernels a call launches, and those that take longest."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    found = [event for event in profile.key_averages() if str(event.device_type).endswith("CUDA")]
    longest = sorted(found, key=lambda event: -event.self_device_time_total)[:5]
    parts = ", ".join(f"{event.key[:40]} {event.self_device_time_total:.0f} us" for event in longest)
    return f"{sum(event.count for event in found)} launches: {parts}"


def optimizer() -> None:
    """Clipping and Adam over 26.6 million values in 24 tensors."""
    shapes = [(32_000, 512)] + 10 * [(2048, 512)] + 12 * [(2048,)] + [(4096, 60)]
    parameters = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    values = sum(parameter.numel() for parameter in parameters)
    rate = torch.tensor(1e-3, device=DEVICE)
    with case("optimizer"):
        ours = FusedOptimizer(parameters, name="adam", learning_rate=rate)
        ours.prepare()

        def step() -> None:
            ours.clip("norm", 1.0)
            ours.step()

        milliseconds, peak = timed(step)
        moved = 36 * values / milliseconds / 1e9  # gradients twice; written too, parameters, two moments
        print(
            f"clip + Adam, {values / 1e6:.1f} M values: {milliseconds:.3f} ms, {moved:.2f} TB/s, {peak:.1f} MiB"
        )
        print("  " + kernels_of(step), flush=True)
    with case("torch's optimizer"):
        theirs = torch.optim.Adam(parameters, lr=rate, fused=True, capturable=True)

        def torchs() -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0)
            theirs.step()

        print(f"  torch's clip_grad_norm_ and fused Adam: {timed(torchs)[0]:.3f} ms", flush=True)


def dropped() -> None:
    """Dropout of (128, 100, 512)."""
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(128, 100, 512, device=DEVICE, dtype=dtype, requires_grad=True)
        incoming = torch.randn_like(values)
        seeds = SeedCounter(1, DEVICE)
        seed = seeds.draw()

        def both(
            drop: Callable[[Tensor], Tensor], values: Tensor = values, incoming: Tensor = incoming
        ) -> None:
            torch.autograd.grad(drop(values), values, incoming)

        cells = []
        for name, drop in (
            ("ours", lambda values, seed=seed: dropout(values, 0.2, seed, index=1)),
            ("variational", lambda values, seed=seed: dropout(values, 0.2, seed, True)),
            ("torch", lambda values: functional.dropout(values, 0.2)),
        ):
            with case(f"dropout {name}"):
                milliseconds, peak = timed(functools.partial(both, drop))
                cells.append(f"{name} {1e3 * milliseconds:.1f} us / {peak:.0f} MiB")
        with case("mask"):
            make = functools.partial(random.keep_mask, values.numel(), seed, 1, keep_threshold(0.2))
            cells.append(f"mask alone {1e3 * timed(make)[0]:.1f} us")
        print(
            f"dropout 128 x 100 x 512 {str(dtype)[6:]}, forward + backward: " + ", ".join(cells), flush=True
        )


def lookup() -> None:
    """Gradients of look-ups, and rows reversed within their lengths."""
    weight = torch.randn(32_000, 512, device=DEVICE, requires_grad=True)
    draw = torch.Generator(DEVICE).manual_seed(1)
    ids = torch.randint(1, 32_000, (128, 100), generator=draw, device=DEVICE)
    ids[:, ::5] = 7
    incoming = torch.randn(128, 100, 512, generator=draw, device=DEVICE)

    exact = torch.zeros(32_000, 512, device=DEVICE, dtype=torch.float64)
    exact.index_add_(0, ids.flatten(), incoming.flatten(0, 1).double())
    functions = {
        "torch": lambda: functional.embedding(ids, weight, 0),
        "ours": lambda: look_up(weight, ids, 0),
    }
    for name, function in functions.items():
        with case(f"look-up, {name}"):

            def gradient(function: Callable[[], Tensor] = function) -> Tensor:
                return torch.autograd.grad(function(), weight, incoming)[0]

            error = float((gradient().double() - exact).abs().max())
            same = gradient().equal(gradient())
            milliseconds, peak = timed(gradient)
            print(
                f"look-up of 12,800 in 32,000 x 512, {name}: {1e3 * milliseconds:.0f} us / {peak:.0f} MiB, "
                f"error {error:.1e}, repeats equal: {same}; {kernels_of(gradient)}",
                flush=True,
            )
    lengths = torch.randint(1, 101, (128,), generator=draw, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float32):
        rows = torch.randn(128, 100, 512, device=DEVICE, dtype=dtype, requires_grad=True)
        with case("reversal"):

            def turned(rows: Tensor = rows) -> None:
                torch.autograd.grad(reverse_rows(rows, lengths), rows, rows.detach())

            milliseconds, peak = timed(turned)
            print(
                f"reversal of 128 x 100 x 512 {str(dtype)[6:]}, forward + backward: "
                f"{1e3 * milliseconds:.1f} us / {peak:.0f} MiB; {kernels_of(turned)}",
                flush=True,
            )


PARTS: dict[str, Callable[[], None]] = {
    "checks": checks,
    "output": output,
    "kernel": kernel,
    "optimizer": optimizer,
    "dropout": dropped,
    "lookup": lookup,
}


def main() -> None:
    """Runs the parts named on the command line, or all."""
    began = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in sys.argv[1:] or PARTS:
        with case(part):
            PARTS[part]()
        print(f"[{part}: {time.perf_counter() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
