"""Kernels that are compiled in threads are there when they are launched, and not launched before."""

from __future__ import annotations

from tests.ops.triton.compiled import compiled


def test_kernels_are_compiled_and_loaded_by_threads_and_launched_later() -> None:
    assert compiled("compiling_in_threads", 90) == {
        "compiled": 4,
        "compiled after": 0,
        "loaded by others": 4,
        "launched": 0,
        "launched after": 3,
        "launched by another": 1,
        "error": "no kernel",
    }
