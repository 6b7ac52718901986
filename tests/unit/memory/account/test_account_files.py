"""Accounts are read by other programs and compared; the examples of their documentation run."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import econmt_memory as memory
from econmt_memory.account.advice import advise
from econmt_memory.account.comparison import AccountComparison
from econmt_memory.measure.ledger import Ledger, TensorAtPeak
from econmt_memory.measure.storages import Beginning, Change, MemoryRecord, Storage
from econmt_memory.report.tables import format_bytes
from tests.conftest import ROOT
from tests.unit.memory.account.models import GPT, Case, adam, gpt, next_word_loss, tracked


def test_changes_are_sorted_by_their_size_in_either_direction() -> None:
    a, gone, same = ("weights", "a"), ("weights", "gone"), ("gradients", "same")
    c, new = ("other", "c"), ("workspace", "new")
    entries = {a: 10, gone: 7, same: 5, c: 2}, {a: 11, same: 5, c: 6, new: 3}
    before, after = (Ledger(sum(each.values()), Counter(each)) for each in entries)
    comparison = AccountComparison(before, after)
    assert list(comparison.changes().items()) == [(gone, -7), (c, 4), (new, 3), (a, 1)]
    assert comparison.grown == 1
    table = comparison.table()
    assert table.rows[0] == ["gone", "weights", 7, 0, -7]
    assert table.rows[2] == ["new", "workspace", 0, 3, 3]
    assert table.sums == ["all", "", 24, 25, 1]
    assert AccountComparison(before, before).table().sums[-1] == 0


@pytest.fixture(scope="module")
def account() -> memory.Account:
    torch.manual_seed(0)
    return tracked(gpt())


def test_live_bytes_over_time() -> None:
    """Beside a storage that is known at the start there are two bytes of which nothing else is known."""
    record = MemoryRecord(torch.device("cpu"))
    old, new = (Storage(0, (), torch.uint8, operator, "m", 0) for operator in ("", "exp"))
    record.before, record._at_start = [(old, 5)], 7
    record.begins = [Beginning("forward", 0.0, 0), Beginning("backward", 2.0, 1)]
    sizes = (1.0, new, 10), (2.0, new, -4), (3.0, old, -5), (4.0, new, 9), (5.0, new, -15)
    record.changes = [Change(*each) for each in sizes]
    other, workspace = ("other", "outside of modules"), ("workspace", "m")
    account = memory.Account(record)  # type: ignore[arg-type]
    account.ledger = Ledger()
    assert account.over_time() == [
        (0.0, "forward", {other: 2}),
        (0.0, "forward", {other: 7}),
        (1000.0, "forward", {other: 7, workspace: 10}),
        (2000.0, "backward", {other: 7, workspace: 6}),
        (3000.0, "backward", {other: 2, workspace: 6}),
        (4000.0, "backward", {other: 2, workspace: 15}),
        (5000.0, "backward", {other: 2}),
    ]
    assert record.peak() == (17, 1), "the first of equals"


def test_files(account: memory.Account, tmp_path: Path) -> None:
    rows = list(csv.DictReader(account.to_csv(tmp_path / "a.csv").splitlines()))
    assert sum(int(row["all"]) for row in rows) == account.peak_bytes
    (head,) = (row for row in rows if row["module"] == "head")
    assert (int(head["weights"]), int(head["stash"])) == (4 * 500 * 64, account.ledger.stash["head"])
    moments = account.over_time()
    assert max(sum(sizes.values()) for _, _, sizes in moments) == account.peak_bytes
    page = tmp_path / "page.html"
    account.save(page, depth=1)
    assert "Memory of a training step: GPT" in (text := page.read_text())
    assert text.count('<path class="k-backward"') == 1
    assert f"{account.peak_bytes:,} bytes" in text
    assert 'data-kind="optimizer state"' in text
    bare = memory.Account(SimpleNamespace())
    bare.ledger = Ledger(4, Counter({("weights", "a"): 4}), Counter(b=8))  # b holds nothing at the peak
    assert bare.to_csv().splitlines()[1:] == ["a,0,4,0,0,0,0,4,0", "b,0,0,0,0,0,0,0,8"]


def test_modules_below_a_depth_count_for_those_above(account: memory.Account) -> None:
    whole, rolled = account.ledger, account.rolled_up(1)
    for name in ("entries", "stash"):
        parts: dict[Any, float] = getattr(rolled, name)
        assert sum(parts.values()) == pytest.approx(sum(getattr(whole, name).values()))
        assert not any("." in (key if isinstance(key, str) else key[1]) for key in parts)
    assert not any("." in tensor.layer for tensor in rolled.largest)
    assert any("." in tensor.layer for tensor in whole.largest)


def test_what_grew(account: memory.Account, tmp_path: Path) -> None:
    torch.manual_seed(0)
    wider = tracked(gpt(2))
    comparison = memory.compare(account, wider)
    assert comparison.grown == wider.peak_bytes - account.peak_bytes
    assert sum(comparison.changes().values()) == comparison.grown
    weights = {name: size for (kind, name), size in comparison.changes().items() if kind == "weights"}
    assert weights["head"] == 4 * (1000 * 128 - 500 * 64)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    account.to_json(one)
    wider.to_json(two)
    assert memory.compare(one, two).changes() == comparison.changes()
    assert memory.compare(one, two).grown == comparison.grown
    page = tmp_path / "page.html"
    for each in (comparison, memory.compare(one, two)):
        each.save(page)
        text = page.read_text()
        assert (text.count('class="before"'), text.count('class="k-backward"')) == (1, 1)
        assert f"reference: {format_bytes(account.peak_bytes)}<" in text
    row = '{"ledger": {"entries": [{"category": "weights", "layer": "a", "bytes": %s}]}}'
    for content in ("[]", row % "Infinity", row % ("9" * 5000), "[" * 100_000):
        two.write_text(content)
        with pytest.raises(ValueError, match="no memory account; expected the output of"):
            memory.compare(one, two)
    with pytest.raises(ValueError, match="No such file"):
        memory.compare(one, tmp_path / "three.json")


class Greedy(nn.Module):
    """Asks for more memory than any machine has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(1 << 44, *x.shape).contiguous()


def test_when_the_memory_is_full_the_account_says_what_was_alive() -> None:
    torch.manual_seed(0)
    model = GPT(200, 64, 6)
    greedy, ids = Greedy(), torch.randint(0, 200, (8, 64))
    optimizer = adam(model)
    case = Case(model, optimizer, lambda: next_word_loss(model, ids))
    case.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="allocate"), memory.track([model, greedy], optimizer) as account:
        greedy(model(ids)).sum().backward()
    assert account.full == (1 << 44) * 8 * 64 * 200 * 4
    assert account.peak_bytes == sum(account.by_category().values())
    assert account.by_category()["gradients"] == 0
    assert account.by_module(2)["blocks.5"]["feature maps"] > 100_000
    advice = {each.text: each.bytes for each in account.advice()}
    assert advice["checkpoint each of the 6 modules Block in blocks"] > 0
    assert "halve the batch" in advice
    assert advice["use an optimizer with 8-bit state"] < account.by_category()["optimizer state"]
    assert list(advice.values()) == sorted(advice.values(), reverse=True)
    assert "what would make room" in {table.title for table in account.tables().values()}


@pytest.mark.parametrize(
    ("asked", "size"), [("2.50 GiB", 5 << 29), ("20.00 MiB", 20 << 20), ("1.5 KiB", 1536), ("512 bytes", 512)]
)
def test_what_a_gpu_was_asked_for(asked: str, size: int) -> None:
    account = memory.Account(SimpleNamespace())
    account.fail(
        torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has 1.00 GiB free.")
    )
    assert account.full == size
    account.fail(MemoryError())
    assert account.full == 0, "unknown"
    assert account.notes[-1] == "The memory was full; the tables show what was alive then."


def test_advice_to_the_byte() -> None:
    ledger = Ledger(peak=1812)
    ledger.entries.update(
        {("feature maps", "m.0"): 600, ("feature maps", "m.1"): 380, ("feature maps", "m.1.sub"): 20}
    )
    ledger.entries.update(
        {("weights", "m.0"): 150, ("gradients", "m.0"): 150, ("optimizer state", "m.0"): 512}
    )
    map_of = TensorAtPeak(501, (), "float32", "feature maps", "m.0", "")
    ledger.largest = [map_of, map_of._replace(category="weights"), map_of._replace(dtype="bfloat16")]
    kinds = {"m": "Model", "m.0": "Block", "m.1": "Block", "m.1.sub": "Sub"}
    inputs = {"m": 5, "m.0": 100, "m.1": 30, "m.1.sub": 20}
    texts = {each.text: each.bytes for each in advise(ledger, kinds, inputs)}
    assert list(texts.items()) == [
        ("halve the batch", (1812 - 150 - 150 - 512) // 2),
        ("compute in bfloat16 (torch.autocast)", 500),
        ("use an optimizer with 8-bit state", 384 - 2),
        ("checkpoint each of the 2 modules Block in m", 370),
    ]
    ledger.largest[0] = map_of._replace(bytes=500)  # no more than half of them is wide
    assert "compute in bfloat16 (torch.autocast)" not in {each.text for each in advise(ledger, kinds, inputs)}
    ledger.peak = 38_000  # of which 370 bytes are less than a hundredth
    found = [each.text for each in advise(ledger, kinds, inputs)]
    assert found == ["halve the batch", "use an optimizer with 8-bit state"]


def test_advice_saves_what_it_predicts() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (8, 64))

    def peak(checkpointed: bool, rows: int) -> memory.Account:
        torch.manual_seed(0)
        model = GPT(50, 64, 4, checkpointed=checkpointed)
        return tracked(Case(model, adam(model), lambda: next_word_loss(model, ids[:rows])))

    plain = peak(False, 8)
    advice = {each.text: each.bytes for each in plain.advice()}
    saved = plain.peak_bytes - peak(True, 8).peak_bytes
    assert advice["checkpoint each of the 4 modules Block in blocks"] == pytest.approx(saved, rel=0.15)
    assert advice["halve the batch"] == pytest.approx(plain.peak_bytes - peak(False, 4).peak_bytes, rel=0.1)


def test_an_error_of_the_program_leaves_the_account() -> None:
    case = gpt()
    with pytest.raises(ZeroDivisionError), memory.track(case.model) as account:
        _ = case.loss().item() / 0
    assert account.notes == ["The step ended with ZeroDivisionError; the account counts until then."]
    assert account.by_category()["weights"] == sum(each.nbytes for each in case.model.parameters())
    with pytest.raises(KeyboardInterrupt), memory.track(case.model):
        raise KeyboardInterrupt
    with memory.track(case.model) as again:
        _ = case.loss().item()
    assert again.notes == []
    assert (again.peak_bytes, again.by_category()) == (account.peak_bytes, account.by_category())


def blocks(file: str, kind: str = "python") -> list[str]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_example_of_own_models(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("econmt_ops")
    (example,) = blocks("docs/own-models.md")
    torch.manual_seed(0)
    exec(compile(example, "docs/own-models.md", "exec"), {"__name__": "example"})
    before, after = re.findall(r"[\d,]{5,}", capsys.readouterr().out)
    # tanh(q + k), B T S A values of four bytes, is no longer kept; the projected queries and keys are.
    saved = int(before.replace(",", "")) - int(after.replace(",", ""))
    assert saved >= 4 * 8 * 64 * (50 * 60 - 50 - 60)


def test_the_examples_of_the_memory_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate([blocks("memory/README.md")[0], *blocks("docs/memory-account.md")]):
        exec(compile(block, f"block {number} of memory-account.md", "exec"), names)
    assert number == 5
    files = {"page.html", "modules.csv", "before.json", "grown.html"}
    assert {path.name for path in tmp_path.iterdir()} == files
    printed = capsys.readouterr().out
    assert "where the bytes of a training step went" in printed
    assert "Predicted for cuda; no step was run." in printed
    # The step runs again between the accounts, on the same shapes.
    assert names["comparison"].grown == 0


def test_the_readme_shows_what_its_example_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    (example, *_), (shown,) = (blocks("memory/README.md", kind) for kind in ("python", "text"))
    exec(compile(example, "the example of README.md", "exec"), {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed[: len(shown.splitlines())] == shown.splitlines()
