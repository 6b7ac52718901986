"""Times ops on a GPU beside PyTorch and other packages, each checked against float64 first.

    python -m scripts.bench gpu.peers [output] [recurrence] [lstm]     none: all

``lstm`` compares `econmt_ops.LSTM` with `torch.nn.LSTM`, forward and backward with all gradients: under autocast to
bfloat16, and in float32 with TF32 allowed (PyTorch's default for cuDNN) and forbidden. "host" is the time until an
eager call returns, in microseconds; "eager" is the time of an eager call among many, "graph" that of one in a CUDA
graph, both in milliseconds.

Peers are timed where they are installed: liger-kernel, cut-cross-entropy, accelerated-scan (which compiles its kernels
for a minute). Weights of the output layer are in bfloat16. Everything is captured in a CUDA graph and timed in turns:
medians of replays, milliseconds; MB (10^6 bytes) are what an eager call allocates at its peak beyond its gradients.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import econmt_ops
from econmt_ops.dispatch.rule import captured
from econmt_ops.linear_cross_entropy import recompute
from scripts.bench.arguments import parser_of

Call = Callable[..., Any]
DEVICE = torch.device("cuda")
LAYERS = ((6400, 512, 32_000), (12_800, 512, 7709), (8192, 2048, 128_256))
SCANS = (
    (8, 4096, 1536),
    (8, 1024, 1536),
    (128, 128, 512),
    (128, 100, 512),
    (2, 16_384, 1024),
    (1, 65_536, 128),
    (1, 1_048_576, 128),
)
SEQUENCES = (
    (256, 50, 128, 1),
    (64, 100, 512, 1),
    (64, 100, 512, 2),
    (16, 1024, 768, 1),
    (128, 100, 1024, 1),
    (1, 1024, 512, 1),
    (256, 256, 128, 1),
    (32, 35, 200, 1),
    (32, 35, 200, 2),
    (16, 20, 64, 1),
)
"""Batch, steps, hidden size and number of layers of the LSTM."""
PRECISIONS = ("bfloat16", "tf32", "ieee")
WORKERS = 12
"""Processes that compile kernels at first."""
TURNS = 9
LONGEST = 8192
"""Most steps for accelerated-scan 0.3.1: from 16,384 on it is wrong by 1 %, and in bfloat16 ends in an error."""
LARGE = recompute.LARGE_VOCABULARY


def has(name: str) -> bool:
    """Returns True if a package is installed."""
    return importlib.util.find_spec(name) is not None


def graph(call: Call, repeats: int) -> torch.cuda.CUDAGraph:
    """The call, so many times, as a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(repeats):
            call()
    return captured


def timed(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Milliseconds of each call, in turns; a call that cannot be captured is timed as it is."""
    replays: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        try:
            replays[name] = graph(call, repeats).replay
        except RuntimeError as error:
            print(f"  {name}: not in a graph: {str(error).splitlines()[0][:90]}")
            torch.cuda.synchronize()
            replays[name] = lambda call=call: [call() for _ in range(repeats)]
    taken: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(TURNS):
        for name, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(begin.elapsed_time(end) / repeats)
    return {name: sorted(each)[TURNS // 2] for name, each in taken.items()}


def peak(call: Call, gradients: int) -> float:
    """MB beyond the gradients."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - gradients) / 1e6


def layers() -> dict[str, Call]:
    """The mean loss of hidden, weight and targets by everything there is."""

    def ours(large: int, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        recompute.LARGE_VOCABULARY = large
        return econmt_ops.linear_cross_entropy(hidden, weight, targets)

    def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight).float(), targets)

    found: dict[str, Call] = {
        "ours": functools.partial(ours, LARGE),
        "ours, by rows": functools.partial(ours, 1 << 62),
        "ours, by words": functools.partial(ours, 0),
        "torch": by_torch,
    }
    if has("liger_kernel"):
        liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda hidden, weight, targets: liger(weight, hidden, targets)
    if has("cut_cross_entropy"):
        cut = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        found["cut cross-entropy"] = cut
    return found


def output() -> None:
    """Forward and backward of the output layer."""
    for rows, inner, words in LAYERS:
        draw = torch.Generator(DEVICE).manual_seed(1)
        make = functools.partial(torch.randn, generator=draw, device=DEVICE)
        hidden = make(rows, inner).bfloat16().requires_grad_()
        weight = make(words, inner).mul_(0.02).bfloat16().requires_grad_()
        targets = torch.randint(words, (rows,), generator=draw, device=DEVICE)
        sizes = [hidden.numel() * 2, weight.numel() * 2]

        def step(
            loss: Call, hidden: Tensor = hidden, weight: Tensor = weight, targets: Tensor = targets
        ) -> Any:
            return torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))

        few = slice(0, 1024)
        exact = [hidden.detach()[few].double().requires_grad_(), weight.detach().double().requires_grad_()]
        wanted = torch.autograd.grad(functional.cross_entropy(exact[0] @ exact[1].t(), targets[few]), exact)
        wanted = tuple(each.float() for each in wanted)
        del exact
        calls: dict[str, Call] = {}
        notes: dict[str, str] = {}
        for name, loss in layers().items():
            found = step(loss, hidden.detach()[few].requires_grad_(), weight, targets[few])
            errors = [
                float((one.float() - other).norm() / other.norm())
                for one, other in zip(found, wanted, strict=True)
            ]
            del found
            calls[name] = functools.partial(step, loss)
            calls[name]()
            notes[name] = f"{peak(calls[name], sum(sizes)):8.0f} MB  errors {errors[0]:.1e} {errors[1]:.1e}"
        del wanted
        print(f"{rows} x {inner} x {words}")
        for name, taken in timed(calls, 1).items():
            print(f"  {name:20} {taken:8.3f} ms {notes[name]}", flush=True)


def recurrence() -> None:
    """Forward, and forward and backward, beside a copy of as many bytes."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SCANS:
            draw = torch.Generator(DEVICE).manual_seed(1)
            made = [torch.randn(shape, generator=draw, device=DEVICE) for _ in range(3)]
            decay, inputs, given = made[0].sigmoid_().to(dtype), made[1].to(dtype), made[2].to(dtype)
            del made
            scans = {"ours": functools.partial(econmt_ops.linear_recurrence, implementation="triton")}
            if has("accelerated_scan") and shape[1] & (shape[1] - 1) == 0 and shape[1] <= LONGEST:
                scans["accelerated-scan"] = importlib.import_module("accelerated_scan.warp").scan
            exact = [each.double().requires_grad_() for each in (decay, inputs)]
            outputs = econmt_ops.linear_recurrence(*exact, implementation="chunk")
            wanted = [outputs.detach(), *torch.autograd.grad(outputs, exact, given.double())]
            calls: dict[str, Call] = {}
            notes: dict[str, str] = {}
            for name, scan in scans.items():
                turned = name != "ours"  # which has time last
                own = [
                    (each.mT.contiguous() if turned else each).detach().requires_grad_(number < 2)
                    for number, each in enumerate((decay, inputs, given))
                ]

                def forward(scan: Call = scan, own: list[Tensor] = own) -> Any:
                    with torch.no_grad():
                        return scan(own[0], own[1])

                def both(scan: Call = scan, own: list[Tensor] = own) -> Any:
                    return torch.autograd.grad(scan(own[0], own[1]), own[:2], own[2])

                found = [forward(), *both()]
                error = max(
                    float(((one.mT if turned else one).double() - other).norm() / other.norm())
                    for one, other in zip(found, wanted, strict=True)
                )
                del found
                calls |= {f"{name}, forward": forward, f"{name}, both": both}
                notes |= dict.fromkeys((f"{name}, forward", f"{name}, both"), f"error {error:.1e}")
            del exact, outputs, wanted
            for what, count in (("forward", 3), ("both", 8)):
                source = torch.randn(decay.numel() * count // 2, device=DEVICE).to(dtype)
                target = torch.empty_like(source)
                calls[f"copy, {what}"] = functools.partial(target.copy_, source)
            found_ms = timed(calls, max(1, min(20, 10**9 // (decay.nbytes * 4))))
            print(f"{' x '.join(map(str, shape))} {str(dtype)[6:]}")
            for name, taken in found_ms.items():
                share = found_ms[f"copy, {name.rpartition(', ')[2]}"] / taken
                print(
                    f"  {name:26} {taken:8.4f} ms ({share:4.0%} of a copy) {notes.get(name, '')}", flush=True
                )


class Stack:
    """An LSTM stack's training step without an optimizer.

    Args:
        kind: `torch.nn.LSTM` or `econmt_ops.LSTM`.
        shape: batch, steps, hidden size and number of layers.
        precision: one of `PRECISIONS`.
    """

    def __init__(self, kind: Call, shape: tuple[int, int, int, int], precision: str) -> None:
        batch, steps, hidden, layers = shape
        torch.manual_seed(1)
        self.module = kind(hidden, hidden, layers, batch_first=True, device=DEVICE)
        self.inputs = torch.randn(batch, steps, hidden, device=DEVICE, requires_grad=True)
        self.given = torch.randn(batch, steps, hidden, device=DEVICE)
        self.leaves = [self.inputs, *self.module.parameters()]
        self.lowered = precision == "bfloat16"

    def forward(self) -> Tensor:
        """Returns the outputs (B, T, H)."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.lowered):
            outputs: Tensor = self.module(self.inputs)[0]
        return outputs

    def __call__(self) -> tuple[Tensor, ...]:
        """Returns the outputs and all gradients."""
        outputs = self.forward()
        return outputs, *torch.autograd.grad(outputs, self.leaves, self.given.to(outputs.dtype))

    def error(self) -> float:
        """Returns the largest error of the outputs and gradients against float64, as a ratio of norms."""
        exact = torch.nn.LSTM(
            self.module.input_size, self.module.hidden_size, self.module.num_layers, batch_first=True
        ).to(DEVICE, torch.float64)
        exact.load_state_dict(self.module.state_dict())
        inputs = self.inputs.detach().double().requires_grad_()
        outputs = exact(inputs)[0]
        wanted = [outputs, *torch.autograd.grad(outputs, [inputs, *exact.parameters()], self.given.double())]
        return max(
            float((one.detach().double() - other.detach()).norm() / other.detach().norm())
            for one, other in zip(self(), wanted, strict=True)
        )


def host_and_eager(stacks: dict[str, Stack]) -> dict[str, tuple[float, float]]:
    """Returns by name the microseconds until a call returns and the milliseconds of a call among many, in turns."""
    host: dict[str, list[float]] = {name: [] for name in stacks}
    eager: dict[str, list[float]] = {name: [] for name in stacks}
    for stack in stacks.values():
        for _ in range(5):
            stack()
    for _ in range(TURNS):
        for name, stack in stacks.items():
            for _ in range(5):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                stack()
                host[name].append(1e6 * (time.perf_counter() - begin))
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(10):
                stack()
            torch.cuda.synchronize()
            eager[name].append(100 * (time.perf_counter() - begin))
    return {name: (median(host[name]), median(eager[name])) for name in stacks}


def median(values: list[float]) -> float:
    """Returns the middle one of the sorted values."""
    return sorted(values)[len(values) // 2]


def allow_tf32(precision: str) -> None:
    """Sets PyTorch's switches; of the products outside of cuDNN they stay as they are by default."""
    torch.backends.cudnn.allow_tf32 = precision != "ieee"
    torch.backends.cuda.matmul.allow_tf32 = False


def compile_lstms(number: int) -> None:
    """Compiles the kernels of a part of the stacks into Triton's cache: what one of several processes does."""
    for precision, shape in list(itertools.product(PRECISIONS, SEQUENCES))[number::WORKERS]:
        allow_tf32(precision)
        batch, _, hidden, _ = shape
        Stack(econmt_ops.LSTM, (batch, 3, hidden, 1), precision)()
        torch.cuda.synchronize()


def lstm() -> None:
    """Stacks of LSTM layers beside torch.nn.LSTM, with and without a CUDA graph."""
    workers = [
        subprocess.Popen([sys.executable, "-m", "scripts.bench.gpu.peers", "compile", str(each)])
        for each in range(WORKERS)
    ]
    for worker in workers:
        worker.wait()
    kinds = {"ours": econmt_ops.LSTM, "nn.LSTM": torch.nn.LSTM}
    print(
        f"{'B x T x H x layers':20} precision  {'':8} {'host us':>8} {'eager ms':>9} {'graph ms':>9}  error"
    )
    for precision in PRECISIONS:
        allow_tf32(precision)
        for shape in SEQUENCES:
            stacks = {name: Stack(kind, shape, precision) for name, kind in kinds.items()}
            errors = {name: stack.error() for name, stack in stacks.items()}
            calls = host_and_eager(stacks)
            with captured():
                graphs = timed(dict(stacks), 1)
            for name, (host, eager) in calls.items():
                print(
                    f"{' x '.join(map(str, shape)):20} {precision:10} {name:8} {host:8.0f} {eager:9.3f} "
                    f"{graphs[name]:9.3f}  {errors[name]:.1e}",
                    flush=True,
                )
            ratios = (calls["nn.LSTM"][1] / calls["ours"][1], graphs["nn.LSTM"] / graphs["ours"])
            print(f"{'':40} eager {ratios[0]:.2f}x, graph {ratios[1]:.2f}x", flush=True)


def main() -> None:
    """Runs the parts named on the command line, or all."""
    if sys.argv[1:2] == ["compile"]:
        compile_lstms(int(sys.argv[2]))
        return
    parts: dict[str, Callable[[], None]] = {"output": output, "recurrence": recurrence, "lstm": lstm}
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(parts)}; default: all")
    wanted = parser.parse_args().parts or list(parts)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in wanted:
        parts[part]()


if __name__ == "__main__":
    main()
