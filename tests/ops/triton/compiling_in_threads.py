"""Compiles kernels within `compiling_only` for a GPU that this machine does not have.

Run as a program, in a process of its own, because there the interpreter is off:

    python -m tests.ops.triton.compiling_in_threads CAPABILITY

prints a JSON object: the numbers of kernels that were compiled within the context and after it, of those that were loaded
by another thread, of those that were launched within the context and after it, and of those that another thread launched
meanwhile; the error of the first launch of a kernel that could not be compiled; and what a kernel of each language takes
of a small card.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import Future, wait
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel

from econmt_ops.backends.triton import compilation
from econmt_ops.backends.triton.compilation import compiling_only
from econmt_ops.dispatch.rule import MODE
from tests.ops.triton.compiling import pretend, step, taken, update


@triton.jit
def broken(x):  # type: ignore[no-untyped-def]
    """Cannot be compiled."""
    tl.static_assert(False, "no kernel")
    tl.store(x, 0.0)


@triton.jit
def zero(x):  # type: ignore[no-untyped-def]
    """Writes a zero."""
    tl.store(x, 0.0)


def launch_broken() -> None:
    """Launches a kernel again after the error of its compilation."""
    submit = compilation.CompilerThreads.submit

    def finished(threads: Any, compile_kernel: Any) -> Future[Any]:
        future = submit(threads, compile_kernel)
        wait([future])
        return future

    compilation.CompilerThreads.submit = finished  # type: ignore[method-assign]
    for _ in range(3):
        broken[(1,)](torch.ones(1))
    compilation.CompilerThreads.submit = submit  # type: ignore[method-assign]


def main() -> None:
    """Runs and prints."""
    pretend(int(sys.argv[1]))
    counts = dict.fromkeys(
        ("compiled", "compiled after", "loaded by others", "launched", "launched after"), 0
    )
    results: dict[str, Any] = {"launched by another": 0}
    caller = threading.get_ident()

    def is_other() -> bool:
        return threading.current_thread().name == "another"

    def count(name: str) -> None:
        if is_other():
            results["launched by another"] += name == "launched"
            return
        counts[name if MODE.compiles_only else f"{name} after"] += 1

    def load(kernel: Any) -> None:
        counts["loaded by others"] += threading.get_ident() != caller and not is_other()
        kernel._run = lambda *_: count("launched")

    CompiledKernel._init_handles = load
    torch.cuda.set_device = lambda _: None
    knobs.runtime.jit_post_compile_hook = lambda **_: count("compiled")
    with compiling_only(torch.device("cuda")) as compiler:
        # Backward passes on a GPU have a thread of their own otherwise, where launches would be real.
        assert not torch.autograd.is_multithreading_enabled()
        for _ in range(2):
            step(64, torch.bfloat16)
            update(512)
        assert not compiler.failed
        launch_broken()
        other = threading.Thread(target=lambda: zero[(1,)](torch.ones(1)), name="another")
        other.start()
        other.join()
    assert compiler.failed
    step(64, torch.bfloat16)
    try:
        broken[(1,)](torch.ones(1))
    except triton.CompilationError as error:
        results["error"] = str(error).strip().splitlines()[-1]
    knobs.runtime.jit_post_compile_hook = None
    print(json.dumps({**counts, **results, "of a small card": taken(86, "mask", "recurrence float32")}))


if __name__ == "__main__":
    main()
