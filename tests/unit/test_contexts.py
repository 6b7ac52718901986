"""Contexts put back what was there before them, also after an error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from econmt.decoding.batches import evaluation_mode
from econmt.engine.devices import reproducible
from econmt.engine.precision import Precision
from econmt.model.layers import draw_seed, drawing_from
from econmt.parallel.processes import _limited
from econmt_memory.estimate.fake import _without_launches
from econmt_memory.measure.tracker import Tracker
from tests.ops.test_surroundings import check_put_back

CPU, MODULE, TRACKER = torch.device("cpu"), nn.Linear(1, 1), Tracker(torch.device("cpu"))


def is_deterministic() -> tuple[bool, bool, int]:
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled(), filled, torch.get_num_threads()


def launches() -> object:
    jit = pytest.importorskip("triton.runtime.jit")
    return jit.JITFunction.run


def running_timers() -> int:
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return sum(not timer.finished.is_set() for timer in timers)


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda: drawing_from(None, 3), lambda: type(draw_seed())),
        (lambda: evaluation_mode([MODULE]), lambda: (MODULE.training, torch.backends.cudnn.allow_tf32)),
        (lambda: reproducible(CPU, torch.get_num_threads() + 1), is_deterministic),
        (
            lambda: Precision(allow_tf32=True).products(torch.device("cuda")),
            lambda: torch.backends.cuda.matmul.allow_tf32,
        ),
        (_without_launches, launches),
        (TRACKER.recording, lambda: TRACKER._recording),
        (lambda: _limited(600.0, sys.exit), running_timers),
    ],
    ids=["drawing", "evaluation", "reproducible", "TF32", "launches", "tracker", "limit"],
)
def test_an_error_in_a_context_puts_back_what_was_there(
    make: Callable[[], AbstractContextManager[object]], state: Callable[[], object]
) -> None:
    check_put_back(make, state, nested=False)
