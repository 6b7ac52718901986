"""Layers that code, modules and operators of econmt_ops enter are one stack."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import econmt_ops
from econmt_memory.measure import ops_package, scopes
from econmt_ops.core.scopes import layer
from econmt_ops.dispatch.rule import MODE
from tests.conftest import ROOT, run_python

PROGRAM = """
import json, torch
import econmt_memory as memory
import econmt_ops
torch.manual_seed(1)
model = torch.nn.ModuleList([econmt_ops.LSTM(6, 8, num_layers=2, batch_first=True), econmt_ops.SRU(8, 8)])
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    outputs, _ = model[0](torch.ones(4, 30, 6))
    model[1](outputs)[0].sum().backward()
    optimizer.step()
step()
with memory.track(model, optimizer) as tracked:
    step()
accounts = [tracked, *(memory.predict(step, model, optimizer, device=device) for device in ("cpu", "cuda"))]
found = [[each.by_module(), each.ledger.stash, each.ledger.operations] for each in accounts]
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


def test_operators_of_econmt_ops_count_alike_without_econmt() -> None:
    folders = ":".join(str(ROOT / name) for name in ("memory", "ops"))
    without = "import sys; sys.modules['econmt'] = None\n" + PROGRAM + "print(json.dumps(found))"
    done = run_python("-c", without, env={"PYTHONPATH": folders})
    names: dict[str, object] = {}
    exec("import econmt.api\n" + PROGRAM, names)
    assert json.loads(done.stdout) == json.loads(json.dumps(names["found"]))
