"""Contexts put back what was there before them, also after an error."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils import _foreach_utils

from econmt import memory
from econmt.decoding.batches import evaluation_mode
from econmt.engine.devices import reproducible
from econmt.engine.parameters import ParameterAverage, in_float32
from econmt.engine.precision import Precision
from econmt.model.layers import draw_seed, drawing_from
from econmt.parallel.processes import _limited
from econmt_memory.estimate.fake import _without_launches
from econmt_memory.estimate.gpu_dispatch import as_on_gpu
from econmt_memory.measure import scopes
from econmt_memory.measure.allocations import _quiet
from econmt_memory.measure.tracker import Tracker
from econmt_ops.optimizers.fused import FusedOptimizer
from tests.ops.test_surroundings import check_put_back

CPU, MODULE, TRACKER = torch.device("cpu"), nn.Linear(1, 1), Tracker(torch.device("cpu"))
HALF = nn.Linear(1, 1).bfloat16()
AVERAGE = ParameterAverage(FusedOptimizer(MODULE.parameters(), name="sgd", learning_rate=0.1))


def is_deterministic() -> tuple[bool, bool, int]:
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled(), filled, torch.get_num_threads()


def launches() -> object:
    jit = pytest.importorskip("triton.runtime.jit")
    return jit.JITFunction.run


def hooks() -> tuple[int, ...]:
    of_modules = torch.nn.modules.module
    each = of_modules._global_forward_pre_hooks, of_modules._global_forward_hooks, _global_optimizer_pre_hooks
    return sys.getrecursionlimit(), *map(len, each)


def running_timers() -> int:
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return sum(not timer.finished.is_set() for timer in timers)


CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[object]], Callable[[], object]]] = {
    "drawing": (lambda: drawing_from(None, 3), lambda: type(draw_seed())),
    "evaluation": (
        lambda: evaluation_mode([MODULE]),
        lambda: (MODULE.training, torch.backends.cudnn.allow_tf32),
    ),
    "reproducible": (lambda: reproducible(CPU, torch.get_num_threads() + 1), is_deterministic),
    "TF32": (
        lambda: Precision(allow_tf32=True).products(torch.device("cuda")),
        lambda: torch.backends.cuda.matmul.allow_tf32,
    ),
    "launches": (_without_launches, launches),
    "tracker": (TRACKER.recording, lambda: TRACKER._recording),
    "limit": (lambda: _limited(600.0, sys.exit), running_timers),
    "float32": (lambda: in_float32(HALF.parameters()), lambda: HALF.weight.dtype),
    "average": (AVERAGE.in_place, lambda: MODULE.weight.tolist()),
    "account": (lambda: memory.track(nn.Linear(1, 1)), hooks),
    "as_on_a_GPU": (as_on_gpu, lambda: _foreach_utils._get_foreach_kernels_supported_devices()),
    "watching": (lambda: scopes.watching(print), lambda: [*scopes._watchers]),
    "quiet": (_quiet, lambda: os.environ.get("KINETO_LOG_LEVEL")),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_an_error_in_a_context_puts_back_what_was_there(name: str) -> None:
    check_put_back(*CONTEXTS[name], nested=False)
