"""Auto by measurement: candidates are timed on a clock of our own, chosen, remembered, and left alone where asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import econmt_ops
from econmt_ops.dispatch import session as sessions
from econmt_ops.dispatch import traits
from econmt_ops.dispatch.measurements import Store, machine
from econmt_ops.dispatch.plans import Plans
from econmt_ops.dispatch.rule import rules_only
from econmt_ops.dispatch.select import Problem, run
from econmt_ops.dispatch.session import forget, measuring
from econmt_ops.dispatch.timing import Timing, quantile
from econmt_ops.dispatch.traits import Candidate, Traits
from tests.ops.helpers import Make

CPU = torch.device("cpu")


class Clock:
    """Stands for `timing.alternate`: calls each function once and says what it is told to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.measured: list[list[str]] = []
        self.samples: dict[str, tuple[float, ...]] = {}
        self.suffices = True
        self.fits: Callable[[str], bool] = bool
        self.enough: list[float] = []

    def __call__(
        self, functions: dict[str, Callable[[], None]], seconds: float, **options: Any
    ) -> dict[str, Timing] | None:
        assert seconds > 0
        self.fits = options["fits"]
        self.enough.append(options["enough"] / seconds)
        if not self.suffices:
            return None
        self.measured.append(list(functions))
        for function in functions.values():
            function()
        times = {name: self.seconds.get(name, 1.0) for name in functions}
        return {
            name: Timing(time, time, time, self.samples.get(name, (time,) * 3), time + 0.5)
            for name, time in times.items()
        }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Clock]:
    """By which recompute is the slower one, with an empty cache folder."""
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path))
    found = Clock()
    found.seconds = {"reference": 1.0, "recompute": 2.0}
    monkeypatch.setitem(traits._OPS, "wave", AVAILABLE)
    monkeypatch.setattr(sessions, "alternate", found)
    monkeypatch.setattr(sessions, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    forget()
    yield found
    forget()


def reference(x: Tensor) -> Tensor:
    return x.sin().sin() * 2  # autograd keeps x, which is the op's own, and sin x


def recompute(x: Tensor, stash: str = "outputs") -> Tensor:
    return x.exp() if stash == "outputs" else x.exp().exp() + x.exp()


AVAILABLE, LOOPS = (
    {
        "reference": Candidate("reference", reference),
        "recompute": Candidate("recompute", recompute, Traits(recomputes=True, takes_stash=takes_stash)),
    }
    for takes_stash in (False, True)
)
COMPILED = Candidate("compiled", recompute, Traits(recomputes=True, warms_up=True))


def call(
    x: Tensor, op: str = "wave", implementation: str = "auto", stash: str = "auto", compiled: bool = False
) -> str:
    """Runs an op and returns the label of what ran."""
    labels: list[str] = []

    def with_candidate(candidate: Candidate, x: Tensor) -> Tensor:
        labels.append(candidate.label)
        result: Tensor = candidate.function(x, **candidate.options)
        return result

    available = LOOPS if op == "lstm" else AVAILABLE
    available = {**available, "compiled": COMPILED} if compiled else available
    problem = Problem(op, (x,), x.dtype, {"N": x.shape[0]}, "")
    with mock.patch.dict(traits._OPS, {op: available}):
        run(problem, with_candidate, implementation, stash=stash)
    return labels[-1]


def variable(size: int = 4) -> Tensor:
    return torch.ones(size, requires_grad=True)


def test_deciles_enclose_the_time_that_is_compared(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one was dropped while the machine was slow, so that its samples are beyond its time."""
    samples = {"reference": (4.0,) * 3 + (1.0,) * 9, "recompute": (6.0, 8.0, 10.0)}
    timings = {
        name: Timing(*(quantile(each, share) for share in (0.5, 0.1, 0.9)), each, each[0])
        for name, each in samples.items()
    }

    def alternate(functions: dict[str, Callable[[], None]], _: float, **options: object) -> dict[str, Timing]:
        for function in functions.values():
            function()
        return timings

    monkeypatch.setattr(sessions, "alternate", alternate)
    with measuring() as session:
        call(variable())
    (measurement,) = session.measurements.values()
    fast, slow = (measurement.records[name][:3] for name in samples)
    assert fast == pytest.approx((1000.0, 1000.0, 4000.0))
    assert slow == pytest.approx((2000.0, 2000.0 * 6.4 / 8.0, 2000.0 * 9.6 / 8.0))
    # Beyond the median, and none if the first call was faster.
    assert [measurement.records[name].first_seconds for name in samples] == [3.0, 0.0]


def test_the_fastest_runs_from_then_on(clock: Clock) -> None:
    assert call(variable()) == "recompute"
    with measuring() as session:
        for _ in range(3):
            assert call(variable()) == "reference"
    assert (clock.measured, clock.enough) == ([["reference", "recompute"]], [1.0])
    (measurement,) = session.measurements.values()
    assert measurement.key == "wave N=4 float32 backward"
    assert (measurement.op, measurement.rule, measurement.calls) == ("wave", "recompute", 3)
    assert measurement.records["recompute"].milliseconds == 2000.0
    assert measurement.records["recompute"].first_seconds == 0.5
    # Outside, and in a process that starts later.
    assert call(variable()) == "reference"
    forget()
    assert call(variable()) == "reference"
    assert call(variable(5)) == "recompute"
    assert call(variable(), op="other") == "recompute"
    assert call(torch.ones(4)) == "reference"


def test_a_view_keeps_its_whole_storage() -> None:
    x = variable()
    with sessions._counting_bytes([x]) as kept:
        _ = x * torch.ones(100)[:4]
    assert [*kept.values()] == [400]


def test_what_is_remembered_is_not_measured_again(clock: Clock) -> None:
    for _ in range(2):
        forget()
        with measuring() as session:
            assert call(variable()) == "reference"
        assert len(session.measurements) == 1
    assert len(clock.measured) == 1
    clock.seconds = {"reference": 3.0, "recompute": 2.0}
    with measuring(remember=False):
        assert call(variable()) == "recompute"
    assert len(clock.measured) == 2
    assert call(variable()) == "reference"


@pytest.mark.parametrize("remember", [True, False])
def test_plans_of_calls_are_made_anew_after_measuring(
    clock: Clock, remember: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plans, "_all", [])
    plans: Plans[str] = Plans()
    plans.add("call", "plan")
    with measuring(remember=remember):
        call(variable())
        plans.add("call", "plan")
    assert not plans
    monkeypatch.setattr("econmt_ops.dispatch.plans._MOST", 2)
    for number in range(5):
        plans.add(number, "plan")
    assert list(plans) == [4]
    monkeypatch.setitem(traits._OPS, "wave", {})
    traits.register("wave", "own", reference, Traits())
    assert not plans


def test_another_machine_is_measured_for_itself(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with measuring():
        call(variable())
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert call(variable()) == "recompute"
    with measuring():
        call(variable())
    assert len(clock.measured) == 2
    assert len(Store().load(machine(CPU))) == 1


def test_bytes_are_counted_and_limited(clock: Clock) -> None:
    clock.seconds = {"reference": 0.9}
    with measuring(byte_limit=10**6) as session:
        assert call(variable(), op="lstm") == "reference"
    (measurement,) = session.measurements.values()
    levels = [f"recompute/{level}" for level in ("least", "outputs", "attention", "cells", "gates")]
    kept = {name: record.bytes for name, record in measurement.records.items()}
    assert list(kept) == ["reference", *levels]
    assert (kept["recompute/outputs"], kept["recompute/gates"], kept["reference"]) == (16, 48, 16)
    clock.seconds |= {"recompute/gates": 0.5, "recompute/outputs": 0.7}
    with measuring(byte_limit=40, remember=False):
        assert call(variable(), op="lstm") == "recompute/outputs"
    with measuring(byte_limit=48, remember=False):
        assert call(variable(), op="lstm") == "recompute/gates"


@pytest.mark.parametrize("limit", [None, 10**6])
def test_a_recurrent_op_keeps_what_it_was_told_to(clock: Clock, limit: int | None) -> None:
    with measuring(byte_limit=limit):
        if limit:
            call(variable(), op="lstm", stash="cells")
            call(torch.ones(4), op="lstm")
            assert clock.measured == [["reference", "recompute/cells"], ["reference", "recompute"]]
            return
        assert call(variable(), op="lstm") == "recompute/gates"
        assert call(variable(5), op="lstm", stash="cells") == "recompute/cells"
        assert call(torch.ones(4), op="lstm") == "reference"
    assert clock.measured == [["reference", f"recompute{level}"] for level in ("/gates", "/cells", "")]


def test_only_what_is_asked_for_is_measured(clock: Clock) -> None:
    with measuring() as session:
        assert call(variable(), implementation="reference") == "reference"
        assert call(variable(), "lstm", "recompute", "cells") == "recompute/cells"
    assert session.measurements == {}
    assert clock.measured == []
    with measuring(only=["recompute/cells", "recompute/gates"], byte_limit=10**6, remember=False) as session:
        call(variable(), op="lstm")
    assert clock.measured == [["recompute/cells", "recompute/gates"]]
    (samples,) = session.samples.values()
    assert samples == {"recompute/cells": (1.0,) * 3, "recompute/gates": (1.0,) * 3}


def test_what_is_measured_now_stands_beside_what_was_before(clock: Clock) -> None:
    with measuring(only=["recompute"]):
        assert call(variable()) == "recompute"
    for _ in range(2):
        with measuring(only=["reference"]) as session:
            assert call(variable()) == "reference"
        (measurement,) = session.measurements.values()
        assert measurement.records.keys() == {"reference", "recompute"}
        forget()
    assert clock.measured == [["recompute"], ["reference"]]


def test_the_time_of_all_measurements_is_counted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half a second; the second begins when less than that is left, and takes its share of it."""
    now = iter(0.25 * number for number in range(1000))
    monkeypatch.setattr(sessions, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    with measuring(seconds=0.9, remember=False, share=0.25) as session:
        labels = [call(variable(size)) for size in (4, 5, 6, 7)]
    assert session.seconds == pytest.approx(0.5 * len(clock.measured))
    assert (len(clock.measured), len(session.measurements)) == (2, 2)
    assert labels[2:] == ["recompute", "recompute"]
    assert clock.enough == pytest.approx([0.25, 0.25])


def test_a_session_remembers_once(clock: Clock, tmp_path: Path) -> None:
    with measuring() as session:
        call(variable())
    for path in [each for each in tmp_path.rglob("*") if each.is_file()]:
        path.unlink()
    session.remember()
    assert Store().load(machine(CPU)) == {}


@pytest.mark.parametrize("implementation", ["auto", "recompute"])
def test_options_are_measured_of_named_implementations_too(clock: Clock, implementation: str) -> None:
    ran: list[Candidate] = []

    def with_candidate(candidate: Candidate, x: Tensor) -> Tensor:
        ran.append(candidate)
        return x.exp()

    x = variable()
    problem, options = Problem("wave", (x,), x.dtype, {"N": 4}, ""), [{"way": "a"}, {"way": "b"}]
    run(problem, with_candidate, implementation, options=options)
    assert (ran[-1].name, ran[-1].options) == ("recompute", {"way": "a"}), "the rule's comes first"
    labels = [AVAILABLE["recompute"]._replace(options=option).label for option in options]
    clock.seconds = {labels[1]: 0.5}
    for _ in range(2):
        with measuring():
            run(problem, with_candidate, implementation, options=options)
        assert (ran[-1].name, ran[-1].options) == ("recompute", {"way": "b"})
    (measured,) = clock.measured
    assert set(labels) <= set(measured)
    assert len(measured) == (4 if implementation == "auto" else 2)


def test_compiled_only_if_asked_for(clock: Clock) -> None:
    clock.seconds = {"reference": 3.0, "recompute": 2.0, "compiled": 1.0}
    with measuring():
        assert call(variable(), compiled=True) == "recompute"
    with measuring(compiled=True) as session:
        assert call(variable(), compiled=True) == "compiled"
    assert clock.measured == [["reference", "recompute"], ["reference", "recompute", "compiled"]]
    # It was called once more, before the others: torch.compile must not count as a slow first call.
    (measurement,) = session.measurements.values()
    assert measurement.records["compiled"].first_seconds < 0.5
    # What is remembered of it counts where it would not have been measured, but not where it is not there.
    assert call(variable()) == "recompute"
    with measuring():
        assert call(variable(), compiled=True) == "compiled"
    with measuring():
        assert call(variable()) == "recompute"


def test_candidates_that_keep_too_much_are_no_measure(clock: Clock) -> None:
    with measuring(byte_limit=16, remember=False):
        call(variable(), op="lstm")
    assert [name for name in clock.measured[0] if clock.fits(name)] == ["reference", "recompute/outputs"]
    with measuring(remember=False):
        call(variable(), op="lstm")
    assert all(clock.fits(name) for name in clock.measured[1])


def test_time_that_does_not_suffice_leaves_the_rule(clock: Clock) -> None:
    clock.suffices = False
    with measuring() as session:
        assert call(variable()) == "recompute"
    assert session.measurements == {}
    assert Store().load(machine(CPU)) == {}
    with measuring(seconds=0.0):
        assert call(variable()) == "recompute"


def test_rules_only(clock: Clock) -> None:
    with measuring(), rules_only():
        assert call(variable()) == "recompute"
    assert clock.measured == []
    with measuring():
        call(variable())
    with rules_only():
        assert call(variable()) == "recompute"
    assert call(variable()) == "reference"


def test_calls_without_a_session_and_of_fake_or_traced_tensors_are_not_measured(clock: Clock) -> None:
    make = Make("cpu")
    econmt_ops.linear_cross_entropy(make(3, 4), make(7, 4), torch.tensor([1, 2, 3]))
    with measuring(), FakeTensorMode() as mode:
        assert call(mode.from_tensor(variable())) == "recompute"
    with measuring():
        assert call(variable().to("meta")) == "recompute"
        traced = torch.compile(econmt_ops.linear, backend="eager", fullgraph=True)
        traced(torch.ones(2, 3, requires_grad=True), torch.ones(4, 3))
    assert clock.measured == []


def test_every_op_can_be_measured(clock: Clock) -> None:
    """With real arguments, forward and backward; each problem has a key of its own, but for two kinds of a problem."""
    from tests.ops.every_op import calls

    with measuring() as session:
        for name, each in calls("cpu", torch.float32).items():
            if name == "linear-column":
                continue
            before = len(session.measurements)
            each.function(**each.arguments)
            expected = before + (name not in ("lstm-reverse", "lnlstm-1"))
            assert len(session.measurements) == expected, name
    keys = list(session.measurements)
    assert keys[0] == "additive_attention B=3 T=2 A=5 S=4 E=6 norm float32 forward"
    assert any(key.startswith("attentional_lstm") and "layers=2 dot not-fed" in key for key in keys)


def test_the_backward_pass_ends_at_the_arguments(clock: Clock) -> None:
    inputs = torch.ones(3, requires_grad=True)
    backward = []
    keys = inputs * 2
    keys.register_hook(lambda _: backward.append("keys"))

    def both(candidate: Candidate, inputs: Tensor, keys: Tensor) -> Tensor:
        result: Tensor = candidate.function(inputs * keys)
        return result

    with measuring():
        for _ in range(2):
            outputs = run(Problem("wave", (inputs, keys), inputs.dtype, {}), both, "auto")
    assert backward == []
    outputs.sum().backward()
    assert backward == ["keys"]


def test_gradients_are_those_of_the_chosen_one(clock: Clock) -> None:
    make = Make("cpu")
    arguments = {"inputs": make(3, 5), "weight": make(4, 5), "bias": make(4)}
    for tensor in arguments.values():
        tensor.requires_grad_()
    expected = torch.autograd.grad(econmt_ops.linear(**arguments).sin().sum(), list(arguments.values()))
    clock.seconds = {"reference/column": 0.5}
    with measuring():
        outputs = econmt_ops.linear(**arguments)
    assert outputs.stride() == (1, 3)
    found = torch.autograd.grad(outputs.sin().sum(), list(arguments.values()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert clock.measured == [[f"reference/{layout}" for layout in ("row", "column", "transposed", "packed")]]
    assert all(tensor.grad is None for tensor in arguments.values())


def test_distinct_rows_are_measured_apart_from_inputs_written_out(clock: Clock) -> None:
    """Choices by measurement tell both apart, but not the number of rows."""
    make = Make("cpu", torch.float32)
    layers, places = make.layers(6, 7, 1), torch.tensor([[0, 1, 1, 0, 3], [1, 3, 3, 3, 3], [0, 0, 3, 3, 1]])
    with measuring(remember=False) as session:
        econmt_ops.lstm(make(3, 5, 6), layers)
        econmt_ops.lstm(econmt_ops.UniqueRows(make(4, 6), places), layers)
        econmt_ops.lstm(econmt_ops.UniqueRows(make(5, 6), places), layers)
    plain, repeated = session.measurements
    assert "repeated" in repeated
    assert "repeated" not in plain
    assert session.measurements[repeated].calls == 2
