"""Kernels that are compiled in threads are there when they are launched, and not launched before."""

from __future__ import annotations

from tests.ops.triton.compiled import assert_fits, compiled


def test_kernels_are_compiled_and_loaded_by_threads_and_launched_later() -> None:
    """And, in the same process, a kernel of each language fits a small card."""
    found = compiled(90, module="compiling_in_threads")
    kernels = found.pop("of a small card")
    assert list(kernels) == ["mask", "recurrence float32"]
    assert_fits(86, kernels)
    assert found == {
        "compiled": 4,
        "compiled after": 0,
        "loaded by others": 4,
        "launched": 0,
        "launched after": 3,
        "launched by another": 1,
        "error": "no kernel",
    }
