"""The tracker sees every storage once, from its first byte to its last, in one stack of layers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import econmt_ops
from econmt_memory.measure import ops_package, scopes
from econmt_memory.measure.tracker import Tracker
from econmt_ops import LSTMWeights, lstm
from econmt_ops.core.scopes import layer
from econmt_ops.dispatch.rule import MODE
from tests.conftest import ROOT, run_python

CPU = torch.device("cpu")


def sizes(tracker: Tracker) -> list[int]:
    """Live bytes after each change."""
    return list(tracker.live())


def test_a_storage_lives_from_its_operator_to_its_last_reference() -> None:
    with Tracker(CPU).recording() as tracker:
        first = torch.zeros(10)  # 40 bytes
        second = first + 1  # 80
        view = first.view(2, 5)[0]
        del first
        third = second.double()  # 160
        del view  # 120
        del second, third
    assert sizes(tracker) == [0, 40, 80, 160, 120, 80, 0]
    assert tracker.peak() == (160, 3)


def test_a_repeated_body_counts_as_the_whole_loop() -> None:
    """Bytes, and operations of each type, those before and a second body among them."""
    left = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.float64)

    def body(number: int) -> Tensor:
        return left[number] @ left[number].t()

    with Tracker(CPU).recording() as whole:
        kept = [body(0)] + [body(0) for _ in range(3)] + [body(1) for _ in range(2)] + [body(0)]
    with Tracker(CPU).recording() as tracker:
        kept += [body(0)]
        with tracker.repeating(2):
            kept += [body(0)]
        with tracker.repeating(1):
            kept += [body(1)]
        kept += [body(0)]
    assert tracker.flops == whole.flops == {torch.float32: 5 * 72, torch.float64: 2 * 72}
    assert tracker.peak()[0] == whole.peak()[0] == (48 + 96) + 5 * 36 + 2 * 72
    assert sizes(tracker)[-1] == sizes(whole)[-1]


def test_views_results_in_place_and_shared_storages_count_once() -> None:
    base = torch.zeros(4, 4)
    with Tracker(CPU).recording() as tracker:
        views = [base[0], base.t(), base.view(16), base.detach()]
        base.add_(1).mul_(2)
        torch.add(base, 1, out=base)
        flat = base.reshape(-1)
    assert sizes(tracker) == [64]
    assert views
    assert flat.data_ptr() == base.data_ptr()


def test_operators_that_resize() -> None:
    with Tracker(CPU).recording() as tracker:
        tensor = torch.empty(0)
        torch.add(torch.ones(3), 1, out=tensor)
        tensor.resize_(100)
        tensor.resize_(1)  # keeps its storage
    assert sizes(tracker) == [0, 0, 12, 24, 12, 400]


def test_what_autograd_keeps_is_alive_until_the_backward_pass() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Tracker(CPU).recording() as tracker:
        tracker.begin("forward")
        value = weight.exp().exp().sum()  # both results of exp are kept, nobody else holds them
        tracker.begin("backward")
        forward = tracker.alive(tracker.begins[1].changes)
        torch.autograd.backward(value)
        tracker.begin("optimizer")
        after = tracker.alive(tracker.begins[2].changes)
    kept = [storage for storage in forward if storage.kept_by is not None]
    assert [(storage.operator, forward[storage]) for storage in kept] == [("aten.exp", 12), ("aten.exp", 12)]
    assert not [storage for storage in after if storage.kept_by is not None]
    assert sum(after.values()) == weight.nbytes + weight.grad.nbytes + value.nbytes


@torch.library.custom_op("econmt_tests::twice", mutates_args=())
def twice(inputs: Tensor) -> Tensor:
    """Uses 64 bytes a value inside."""
    with layer("attention"):
        wide = inputs.double().repeat(8)
    return wide[: len(inputs)].float() * 2


@twice.register_fake
def _(inputs: Tensor) -> Tensor:
    return torch.empty_like(inputs)


def test_the_workspace_inside_of_custom_operators_is_seen() -> None:
    inputs = torch.arange(3.0)
    tracker = Tracker(CPU)
    with tracker.recording(), layer("decoder"):
        result = twice(inputs)
    assert torch.equal(result, 2 * inputs)
    peak, moment = tracker.peak()
    assert peak == 12 + 24 * 8 + 24  # inputs, wide, and inputs in double precision until wide is made
    alive = {storage.operator: storage.layer for storage in tracker.alive(moment)}
    assert alive["econmt_tests.twice aten.repeat"] == "attention"
    assert list(tracker.alive(len(tracker.changes)).values()) == [12, 12]
    (made,) = (s for s in tracker.alive(len(tracker.changes)) if s.operator)
    assert made.layer == "decoder"


def test_layers_in_the_backward_pass_are_those_of_the_forward_pass() -> None:
    weight, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    tracker = Tracker(CPU)
    tracker.nodes.add_parameters({weight: "embedding", other: "output"})
    with tracker.recording():
        tracker.begin("forward")
        with layer("encoder"):
            hidden = weight.exp()
            with layer("attention"):
                looked = hidden.tanh()
            hidden = (hidden * looked).sin()
        with layer("output"):
            value = (hidden * other).sum()
        forward = len(tracker.changes)
        tracker.begin("backward")
        torch.autograd.backward(value)
    made = {(change.storage.operator, change.storage.layer) for change in tracker.changes[forward:]}
    assert {("aten.tanh_backward", "attention"), ("aten.cos", "encoder")} <= made
    assert {where for operator, where in made if operator == "aten.mul"} == {"encoder", "output"}
    assert "other" not in {where for operator, where in made if operator != "aten.ones_like"}


@pytest.mark.parametrize(("rows", "inner", "columns"), [(4, 5, 6), (1, 1, 1)])
def test_floating_point_operations_of_products(rows: int, inner: int, columns: int) -> None:
    left, right = torch.ones(rows, inner), torch.ones(inner, columns)
    with Tracker(CPU).recording() as tracker:
        left @ right
        torch.addmm(torch.zeros(columns), left, right)
        left @ right[:, 0]
        torch.bmm(left.expand(3, rows, inner), right.expand(3, inner, columns))
        (left.bfloat16() @ right.bfloat16()).exp()
        total = torch.zeros(rows, columns).addmm_(left, right)
        torch.mm(left, right, out=total)
    product = 2 * rows * inner * columns
    assert tracker.flops[torch.float32] == 7 * product + 2 * rows * inner
    assert tracker.flops[torch.bfloat16] == product


def test_floating_point_operations_of_lstms() -> None:
    lstm = torch.nn.LSTM(6, 5, batch_first=True, bidirectional=True)
    with Tracker(CPU).recording() as tracker:
        outputs, _ = lstm(torch.ones(2, 7, 6))
        forward = tracker.flops.total()
        torch.autograd.backward(outputs.sum())
    assert forward == 2 * 2 * (7 * 2) * (6 + 5) * (4 * 5)
    assert tracker.flops.total() == 3 * forward


@torch.library.custom_op("econmt_tests::product", mutates_args=())
def product(left: Tensor, right: Tensor) -> Tensor:
    """A product by an operator that PyTorch takes apart for autograd alone."""
    return torch.nn.functional.linear(left, right.t()) + torch.matmul(left, right)


def test_composite_operators_are_taken_apart_inside_of_custom_ones_too() -> None:
    left, right = torch.ones(2, 3, 4), torch.ones(4, 5)
    with Tracker(CPU).recording() as tracker:
        result = product(left, right)
    assert torch.equal(result, torch.full((2, 3, 5), 8.0))
    assert tracker.flops[torch.float32] == 2 * (2 * 6 * 4 * 5)
    operators = {change.storage.operator for change in tracker.changes}
    assert operators <= {f"econmt_tests.product aten.{name}" for name in ("mm", "addmm", "add", "clone")}


@torch.library.custom_op("econmt_tests::recurrence", mutates_args=())
def recurrence(inputs: Tensor, weights: list[Tensor], state: Tensor) -> Tensor:
    """An LSTM, which PyTorch takes apart in one way to run it and in another to trace it."""
    result = torch.lstm(inputs, (state, state), weights, True, 1, 0.0, False, False, False)[0]
    return result.clone()


def test_composite_operators_run_as_they_do_without_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*_: object) -> None:
        raise AssertionError

    for key in list(torch.ops.aten.lstm.input.py_kernels):
        monkeypatch.setitem(torch.ops.aten.lstm.input.py_kernels, key, trace)
    lstm = torch.nn.LSTM(3, 2)
    inputs, state = torch.ones(4, 1, 3), torch.zeros(1, 1, 2)
    weights = [parameter.detach() for parameter in lstm.parameters()]
    with Tracker(CPU).recording() as tracker:
        result = recurrence(inputs, weights, state)
    torch.testing.assert_close(result, lstm(inputs)[0])
    assert tracker.flops[torch.float32] == 2 * 4 * (3 + 2) * 8


@pytest.mark.cuda
def test_on_a_gpu_a_recomputing_lstm_is_followed_through_cudnn() -> None:
    batch, steps, hidden = 128, 70, 256  # more steps than one block has
    layer = LSTMWeights(*(torch.zeros(4 * hidden, *size, device="cuda") for size in ([8], [hidden], [])))
    for weight in layer:
        weight.requires_grad_()
    with Tracker(torch.device("cuda")).recording() as tracker:
        outputs, _ = lstm(torch.ones(batch, steps, 8, device="cuda"), (layer,), implementation="recompute")
        torch.autograd.backward(outputs.sum())
    operators = {change.storage.operator for change in tracker.changes}
    assert "econmt_ops.lstm_layer aten._cudnn_rnn" in operators
    assert "econmt_ops.lstm_layer aten.sigmoid" not in operators


PROGRAM = """
import json, torch
import econmt_memory as memory
import econmt_ops
torch.manual_seed(1)
model = torch.nn.ModuleList([econmt_ops.LSTM(6, 8, num_layers=2, batch_first=True), econmt_ops.SRU(8, 8)])
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    outputs, _ = model[0](torch.ones(4, 5, 6))
    model[1](outputs)[0].sum().backward()
    optimizer.step()
step()
with memory.track(model, optimizer) as tracked:
    step()
accounts = [tracked, *(memory.predict(step, model, optimizer, device=device) for device in ("cpu", "cuda"))]
found = [[each.by_module(), each.ledger.stash] for each in accounts]
"""


def test_watchers_hear_every_change_while_they_watch() -> None:
    heard: list[str] = []
    with scopes.watching(heard.append), layer("decoder"):
        scopes.enter("decoder.cell")
        with layer("attention"):
            assert scopes.current_layer() == "attention"
        scopes.leave()
    with pytest.raises(KeyboardInterrupt), scopes.watching(heard.append):
        raise KeyboardInterrupt  # which ends it, too
    with layer("encoder"):
        pass
    assert heard == ["decoder", "decoder.cell", "attention", "decoder.cell", "decoder", "other"]


def test_layers_of_before_the_import_of_econmt_ops_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[object] = []
    monkeypatch.setattr(scopes, "_layers", [])
    monkeypatch.setattr(scopes, "_watchers", [])
    monkeypatch.setattr(ops_package, "scopes", lambda: imported[0] if imported else None)
    heard: list[str] = []
    with scopes.watching(heard.append):
        scopes.enter("model")
        ops = SimpleNamespace(layers=["attention"], watchers=[])
        imported.append(ops)
        assert scopes.current_layer() == "attention"
        assert ops.layers == ["model", "attention"]
        assert ops.watchers == [heard.append]
        ops.layers.pop()
        scopes.leave()
    assert (ops.layers, ops.watchers, heard) == ([], [], ["model", "other"])


def test_names_of_econmt_ops_are_those_that_it_has() -> None:
    assert ops_package.scopes() is econmt_ops.core.scopes
    with ops_package.following_rules("cuda"):
        assert MODE.device == "cuda"
    with ops_package.whole_operators():
        assert econmt_ops.core.scopes.are_whole
    assert not econmt_ops.core.scopes.are_whole
    assert ops_package.cost_of("econmt_ops::linear_recurrence") is not None


@pytest.mark.slow
def test_operators_of_econmt_ops_count_alike_without_econmt() -> None:
    folders = ":".join(str(ROOT / name) for name in ("memory", "ops"))
    without = "import sys; sys.modules['econmt'] = None\n" + PROGRAM + "print(json.dumps(found))"
    done = run_python("-c", without, env={"PYTHONPATH": folders})
    names: dict[str, object] = {}
    exec("import econmt.api\n" + PROGRAM, names)
    assert json.loads(done.stdout) == json.loads(json.dumps(names["found"]))
