"""Compiles kernels within `compiling_only` for a GPU that this machine does not have.

Run as a program, in a process of its own, because there the interpreter is off:

    python -m tests.ops.triton.compiling_in_threads CAPABILITY

prints a JSON object: the numbers of kernels that were compiled within the context and after it, of those that were loaded
by another thread, and of those that were launched within the context and after it.
"""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from econmt_ops.backends.triton.compilation import compiles_only, compiling_only
from tests.ops.triton.compiling import gradients, step


def main() -> None:
    """Runs and prints."""
    capability = int(sys.argv[1])
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
        )
    )
    counts = dict.fromkeys(
        ("compiled", "compiled after", "loaded by others", "launched", "launched after"), 0
    )
    caller = threading.get_ident()

    def count(name: str) -> None:
        counts[name if compiles_only() else f"{name} after"] += 1

    def load(kernel: Any) -> None:
        counts["loaded by others"] += threading.get_ident() != caller
        kernel._run = lambda *_: count("launched")

    def compiled(**_: Any) -> None:
        count("compiled")

    CompiledKernel._init_handles = load
    torch.cuda.set_device = lambda _: None
    knobs.runtime.jit_post_compile_hook = compiled
    with compiling_only(torch.device("cuda")):
        # Backward passes on a GPU have a thread of their own otherwise, where launches would be real.
        assert not torch.autograd.is_multithreading_enabled()
        for _ in range(2):
            step(64, torch.bfloat16)
            gradients(torch.bfloat16)
    step(64, torch.bfloat16)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
