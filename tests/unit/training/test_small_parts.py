"""Limits, readings, interruptions, devices, progress lines, and what is written on a learning curve."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from econmt import errors
from econmt.checkpoint.state import TrainingState
from econmt.config.recipe import Averaging, EarlyStopping, Training, load_recipe
from econmt.data.files import notice
from econmt.engine.devices import give_back_library_pages, peak_memory, reproducible, resolve_device
from econmt.engine.step import StepResult
from econmt.errors import InputError, TrainingError
from econmt.training.decisions import Pace, RunAverage, end_reason, outlook, seconds_left, share_done
from econmt.training.interrupts import Interrupts
from econmt.training.progress import Figures, Progress, duration
from econmt.training.results import WHY_BELOW, _draw_attention, are_complete, draw_learning_curve
from econmt.training.update_metrics import LEAST, LossScaling, MetricsQueue, UpdateMetrics
from tests.unit.engine.test_step import make_step, make_task

CPU = torch.device("cpu")
NO_PATIENCE = EarlyStopping(max_num_checkpoint_not_improved=None)


def test_a_run_ends_for_the_first_limit_that_it_reaches() -> None:
    for limits, state, epoch, reason in (
        ({"max_updates": 5}, {"update": 4}, 0, None),
        ({"max_updates": 5}, {"update": 5}, 0, "max_updates 5 reached"),
        ({"max_epochs": 2}, {"update": 99}, 1, None),
        ({"max_epochs": 2}, {}, 2, "max_epochs 2 reached"),
        ({"max_seconds": 60}, {"seconds": 59.9}, 0, None),
        ({"max_seconds": 60}, {"seconds": 60.0}, 0, "max_seconds 60 reached"),
        ({}, {"num_not_improved": 7}, 0, None),
        ({}, {"num_not_improved": 8}, 0, "no better perplexity for 8 checkpoints"),
        ({"max_updates": 5, "max_seconds": 1}, {"update": 1, "seconds": 2.0}, 0, "max_seconds 1 reached"),
        ({"max_updates": 9, "early_stopping": NO_PATIENCE}, {"update": 8, "num_not_improved": 1000}, 0, None),
    ):
        assert end_reason(Training(**limits), TrainingState(**state), epoch) == reason


def test_time_left_and_share_done_are_those_of_the_nearest_limit() -> None:
    state = TrainingState(update=100, seconds=50.0, target_tokens=4000)
    for limits, left in (
        ({"max_updates": 300}, 100.0),
        ({"max_epochs": 2}, 150.0),
        ({"max_seconds": 60, "max_updates": 10**6}, 10.0),
    ):
        assert seconds_left(Training(**limits), state, 0.5, 0.5) == pytest.approx(left)
    assert seconds_left(Training(), state, 0.5, 0.5) is None
    assert share_done(Training(max_updates=400, max_epochs=1), state, 0.5) == 0.5
    assert share_done(Training(max_updates=50), state, 0.5) == 1.0
    assert share_done(Training(), state, 0.5) is None


def test_the_outlook_says_what_it_is_based_on() -> None:
    told = outlook(load_recipe("multi30k"), 453, 0.5)
    assert told.startswith(
        "at the speed of the first updates, without validation: an epoch takes about 0:03:46, "
    )
    assert "first BLEU comes at update 450 after about 0:03:45; 20 BLEU took recipes multi30k and" in told
    assert told.endswith("600 to 1,800 updates, about 0:05:00 to 0:15:00 here")
    runs = [load_recipe("multi30k", [f"training.max_updates={last}"]) for last in (1799, 1800)]
    assert ["20 BLEU" in outlook(run, 453, 0.5) for run in runs] == [False, True]
    assert "an epoch takes about 0:01:53, " in outlook(
        load_recipe("multi30k", ["training.update_interval=2"]), 453, 0.5
    )
    assert outlook(load_recipe("quickstart"), 188, 0.1).endswith("at update 50 after about 0:00:05")
    assert outlook(load_recipe("ptb"), 1328, 10).endswith("without validation: an epoch takes about 3:41:20")


def test_readings_come_at_once_on_the_cpu_and_know_what_is_finite() -> None:
    readings = MetricsQueue(CPU)
    index = [np.arange(3)]
    (found,) = readings.submit(4, StepResult(torch.tensor(6.5), torch.tensor(0.25)), 13, index)
    assert (found.update, found.loss, found.gradient_norm, found.tokens) == (4, 6.5, 0.25, 13)
    assert found.finite
    assert readings.flush() == []
    for loss, norm in ((float("nan"), 1.0), (1.0, float("inf")), (float("-inf"), 1.0)):
        (found,) = readings.submit(5, StepResult(torch.tensor(loss), torch.tensor(norm)), 1, index)
        assert not found.finite


def test_readings_of_a_gpu_come_one_update_late_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    class Arrival(NamedTuple):
        """Of a copy that is made when it is waited for."""

        values: torch.Tensor
        host: torch.Tensor

        def synchronize(self) -> None:
            waits.append(float(self.values[0]))
            self.host.copy_(self.values)

    def copy(values: torch.Tensor) -> tuple[torch.Tensor, Arrival]:
        host = torch.zeros_like(values)
        return host, Arrival(values, host)

    monkeypatch.setattr("econmt.training.update_metrics.copy_in_background", copy)
    readings = MetricsQueue(torch.device("cuda"))
    found = []
    for update in (1, 2, 3):
        result = StepResult(torch.tensor(10.0 * update), torch.tensor(0.5))
        ready = readings.submit(update, result, update, [])
        found.append([(reading.update, reading.loss, reading.tokens) for reading in ready])
    assert found == [[], [(1, 10.0, 1)], [(2, 20.0, 2)]]
    assert [(reading.update, reading.loss) for reading in readings.flush()] == [(3, 30.0)]
    assert readings.flush() == []
    assert waits == [10.0, 20.0, 30.0]


def test_the_first_signal_is_remembered_and_the_second_leaves_at_once() -> None:
    """The second, of either kind, by the handler that Ctrl-C had before."""
    called: list[int] = []
    old = signal.signal(signal.SIGINT, lambda number, _: called.append(number))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for number, name, code in ((signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)):
        interrupts = Interrupts()
        with interrupts:
            assert not interrupts.pending
            os.kill(os.getpid(), number)
            assert interrupts.pending
            assert (interrupts.name, interrupts.exit_code) == (name, code)
            for second in (signal.SIGTERM, signal.SIGINT):
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), second)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert called == [signal.SIGTERM, signal.SIGINT] * 2
    signal.signal(signal.SIGINT, old)
    try:
        with Interrupts():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a handler that is set meanwhile stays
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before[0])


def test_a_loss_scale_that_is_the_least_goes_on_and_other_precisions_have_none() -> None:
    scaling, state = LossScaling(None), TrainingState(loss_scale={"scale": 1.0, "good": 0})
    metrics = UpdateMetrics(3, 1.0, 1.0, 9, [], loss_scale=LEAST)
    scaling.count(metrics, state, "saved")
    with pytest.raises(TrainingError, match="update 3 even with a loss scale of 5e-05; saved; lower"):
        scaling.count(metrics._replace(loss_scale=LEAST / 2), state, "saved")
    scaling.restore(state)
    assert state.loss_scale == {}


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, problem: str) -> None:
        with pytest.raises(InputError, match=f"device '{name}': {problem}"):
            resolve_device(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    refused("tpu", "unknown; use auto, cpu, cuda or cuda:N")
    refused("mps", "econmt does not use Apple's GPUs; use device cpu or auto")
    refused("xpu:0", "econmt does not use Intel's GPUs; use device cpu or auto")
    refused("rocm", "PyTorch's builds for ROCm call AMD's GPUs cuda; use device cuda or auto")
    refused("cuda:1", "torch sees no GPU here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve_device(name) for name in ("auto", "cuda:1")] == [*map(torch.device, ("cuda", "cuda:1"))]
    refused("cuda:2", "torch sees 2 GPUs here")


def test_settings_of_determinism_and_threads_are_put_back() -> None:
    switches: Any = torch.utils.deterministic

    def settings() -> tuple[int, bool, bool, bool]:
        modes = (
            torch.are_deterministic_algorithms_enabled,
            torch.is_deterministic_algorithms_warn_only_enabled,
        )
        return torch.get_num_threads(), modes[0](), modes[1](), switches.fill_uninitialized_memory

    before = settings()
    try:
        for mode, warns, fills in ((False, False, True), (True, True, False), (True, False, True)):
            torch.use_deterministic_algorithms(mode, warn_only=warns)
            switches.fill_uninitialized_memory = fills
            with reproducible(CPU, 1):
                assert settings() == (1, True, False, False)
            assert settings() == (before[0], mode, warns, fills)
    finally:
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])
        switches.fill_uninitialized_memory = before[3]


def test_peak_memory_counts_what_the_process_holds() -> None:
    before = peak_memory(CPU)
    held = torch.ones(1 << 25)  # 128 MiB, which no process held before its peak
    while peak_memory(CPU) == before:
        held = torch.ones(2 * len(held))
    assert peak_memory(CPU) >= 4 * len(held)


FIGURES = Figures(1200, 2, 4.0, 3e-4, 0.5, 12345.6, 2_500_000_000, 3725.0)


def test_lines_bars_and_words_of_progress() -> None:
    assert FIGURES.line() == (
        "update 1200  loss 4.0000  12,346 target tokens/s  process peak 2,500 MB  1:02:05 left  "
        "epoch 3  perplexity 54.60  learning rate 0.0003  gradient norm 0.5"
    )
    assert "left" not in FIGURES._replace(left=None).line()
    assert "GPU peak 2,500 MB" in FIGURES._replace(device="cuda").line()
    on_gpu = FIGURES._replace(device="cuda", outside=623_000_000)
    assert "GPU peak 2,500 + 623 MB outside PyTorch  " in on_gpu.line()
    assert "GPU 2,500 + 623 MB  " in on_gpu.line(80)
    assert "GPU 2,500 + 623 MB  " in on_gpu.live(80).plain
    line = "update 1200  loss 4.0000  12,346 tokens/s  process 2,500 MB  1:02:05 left"
    assert FIGURES.line(80) == line
    shorter = FIGURES.line().replace("  learning rate 0.0003", "")
    assert FIGURES.line(len(shorter)) == shorter, "what is too long leaves room for what is not"
    assert FIGURES.line(100).startswith("update 1200  loss 4.0000  12,346 target tokens/s  process peak")
    large = FIGURES._replace(update=1_234_567, updates=2_000_000, left=360_000.0, device="cuda")
    for width in (80, 120):
        for figures in (FIGURES, large, large._replace(updates=None), FIGURES._replace(updates=4000)):
            shown = figures.live(width).plain
            assert len(shown) <= width, shown
            for words in (f"{figures.update:,}", "loss 4.000", "12,346 tokens/s", "2,500 MB", " left"):
                assert words in shown
            assert ("perplexity 54.60" in shown) == (width == 120)
    lengths = {}
    for update in (0, 1000, 2000, 4000):
        shown = FIGURES._replace(update=update, updates=4000).live(80).plain
        heavy, light = (shown.count(bar) for bar in "\u2501\u2500")  # horizontal lines of boxes
        lengths[update] = heavy / (heavy + light)
        assert f"{update:,}/4,000" in shown
    assert lengths == pytest.approx({0: 0.0, 1000: 0.25, 2000: 0.5, 4000: 1.0}, abs=0.1)
    assert "perplexity inf" in FIGURES._replace(loss=1000.0).live(120).plain
    assert duration(59.6) == "0:01:00"


@example([(1.0, 1), (179.0, 2), (0.5, 1), (0.5, 2)])  # the second sample is just old enough at last
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 60.0, 90.0, 180.0, 400.0]), st.integers(0, 2)), max_size=20)
)
def test_the_pace_is_from_the_last_sample_that_is_minutes_old(steps: list[tuple[float, int]]) -> None:
    """Samples are taken at new updates; at least the last two count."""
    pace, samples = Pace(), [(1000.0, 100)]
    assert pace.seconds_per_update(1000.0, 100) == 10.0
    seconds, update = samples[0]
    for more_seconds, more_updates in steps:
        seconds, update = seconds + more_seconds, update + more_updates
        samples += [(seconds, update)] if more_updates else []
        found = pace.seconds_per_update(seconds, update)
        old = [each for each in samples[1:-1] if seconds - each[0] >= 180.0]
        (began, first), (now, last) = (old or samples)[-1 if old else 0], samples[-1]
        assert found == ((now - began) / (last - first) if last > first else seconds / update)


def show(folder: Path, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=250, color_system=None)
    progress = Progress(folder / "log", folder / "tensorboard", console, 0)
    with progress:
        progress.live(FIGURES._replace(update=7))
        progress.updates(FIGURES)
        progress.note("checkpoint [best]")
    return file.getvalue()


def log_of(folder: Path) -> list[str]:
    """The lines of a log without their times."""
    return [line[20:] for line in (folder / "log").read_text().splitlines()]


def test_without_a_terminal_there_are_plain_lines_and_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    event_file_writer._global_uid._value = 0  # files are read in the order of their names: 10 before 8
    assert show(tmp_path, False).splitlines() == [FIGURES.line(80), "checkpoint [best]"]
    assert log_of(tmp_path) == [FIGURES.line(), "checkpoint [best]"]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = ("loss", "learning_rate", "target_tokens_per_second", "process_peak_bytes")
    assert {f"train/{name}" for name in names} <= set(events.Tags()["scalars"])
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (1200, 4.0)
    # What a resumed run writes takes the place of what came after the checkpoint.
    for checkpoint, update in ((1200, 1300), (1299, 1301)):
        resumed = Progress(tmp_path / "log", tmp_path / "tensorboard", Console(quiet=True), checkpoint)
        with resumed:
            resumed.updates(FIGURES._replace(update=update))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1200, 1301]


def test_when_quiet_only_warnings_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "quiet", True)
    progress = Progress(tmp_path / "log", None, Console(quiet=True), 0)
    for say in (progress.note, notice):
        say("something")
        say("warning: something else")
        assert capfd.readouterr().err == "econmt: warning: something else\n"
    assert log_of(tmp_path) == ["something", "warning: something else"]


def test_on_a_terminal_the_line_is_live(tmp_path: Path) -> None:
    shown = show(tmp_path, True)
    assert "1,200  loss 4.000" in shown
    assert "\x1b[" in shown  # the cursor goes back over the line
    assert "checkpoint [best]" in shown
    assert log_of(tmp_path) == [FIGURES.line(), "checkpoint [best]"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_pages_of_libraries_are_given_back_and_come_again() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[2])  # pages of files

    left = torch.ones(8, 8)
    expected, before = left @ left, resident()
    give_back_library_pages()
    assert resident() < before
    assert torch.equal(left @ left, expected)


@pytest.mark.parametrize(("update", "begins"), [(6, True), (7, False)])
def test_averaging_begins_only_at_a_regular_checkpoint(update: int, begins: bool) -> None:
    config = Averaging(start="non-monotone", non_monotone_interval=1)
    average = RunAverage(config, make_step(make_task()).optimizer, 2)
    perplexities = {2: 4.0, 4: 5.0, 6: 4.5, 7: 9.0}
    rows = [{"update": at, "valid_perplexity": value} for at, value in perplexities.items()]
    state = TrainingState(update=update)
    state.metrics = [row for row in rows if row["update"] <= update]
    assert bool(average.checkpoint(state)) == begins
    assert state.average_from == (update if begins else None)


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ([3, 4, 24, 25], 2),
        ([3, 25, 26], 0),
        ([4, 9, 9], 1),
        ([26, 25], 1),
        ([3, 2, 2, 30], 1),
        ([-5, 3], 1),
        ([-5], None),
        ([], None),
    ],
)
def test_the_longest_readable_translation_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int], chosen: int | None
) -> None:
    """A negative length stands for a translation without tokens."""
    results, asked = "econmt.training.results", list[Any]()

    def translate(requests: Sequence[Any]) -> list[Any]:
        asked.extend(requests)
        return [SimpleNamespace(attention=torch.ones(1), source_tokens=[], tokens=[])]

    monkeypatch.setattr(f"{results}.Translator", lambda *_, **__: SimpleNamespace(translate=translate))
    monkeypatch.setattr(f"{results}.draw_attention", lambda *_: [])
    found = [SimpleNamespace(source_tokens=["a"] * abs(n), tokens=["b"] * (n >= 0)) for n in lengths]
    folder, made = SimpleNamespace(pictures=tmp_path), MagicMock()
    pictures = _draw_attention(folder, found, [*range(len(lengths))], made)
    assert (pictures, asked) == (([], []) if chosen is None else ([tmp_path / "attention.png"], [chosen]))


@pytest.mark.parametrize(("update", "test"), [(4, "new"), (4, None), (3, "news"), (5, "news"), (4, "news")])
def test_results_of_another_update_or_test_text_are_not_complete(
    monkeypatch: pytest.MonkeyPatch, update: int, test: str | None
) -> None:
    made = SimpleNamespace(update=4, test="news")
    monkeypatch.setattr("econmt.training.results.read_results", lambda _: made)
    recipe = SimpleNamespace(data=SimpleNamespace(test=test))
    assert are_complete(SimpleNamespace(), recipe, update) == ((update, test) == (4, "news"))


def drawn(metrics: list[dict[str, float]], path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []
    save = Figure.savefig

    def kept(self: Figure, *args: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    draw_learning_curve(metrics, 1000, path, "learning curve of mine")
    (figure,) = figures
    return figure


def row(update: int, loss: float, bleu: float = float("nan")) -> dict[str, float]:
    return {"update": update, "train_loss": loss, "valid_perplexity": 0.9 * 2.718**loss, "bleu": bleu}


@pytest.mark.parametrize("losses", [(5.0, 2.0), (1.2, 1.1), (9.0, 0.5), (0.0, 0.0)])
def test_ticks_are_plain_numbers_and_enough_of_them(
    losses: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = [row(1000, losses[0]), row(20_000, losses[1])]
    axis = drawn(metrics, tmp_path / "curve.png", monkeypatch).axes[0]
    low, high = axis.get_ylim()
    places = zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
    shown = [label.get_text() for place, label in places if low <= place <= high]
    assert 2 <= len(shown) <= 16
    assert all(float(text.replace(",", "")) > 0.0 for text in shown)
    assert len(set(shown)) == len(shown)
    assert "20,000" in [label.get_text() for label in axis.get_xticklabels()]


def test_there_are_a_title_and_the_reason_for_validation_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn([row(1000, 3.0, 5.0)], tmp_path / "curve.png", monkeypatch)
    assert figure.get_suptitle() == "learning curve of mine"
    assert WHY_BELOW in [text.get_text() for text in figure.texts]
    assert len(figure.axes) == 2
