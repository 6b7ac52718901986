"""The memory account of any model adds up to what the allocator gives out, to the byte."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from econmt import memory
from econmt.errors import InputError
from tests.unit.memory.account.models import CASES, Case, gpt
from tests.unit.memory.account.referee import counted_peak


def tracked(case: Case) -> memory.Account:
    """The account of a case's third step."""
    case.step()
    case.step()
    gc.collect()
    with memory.track(case.model, case.optimizer) as account:
        case.step()
    return account


@pytest.mark.parametrize("name", CASES)
def test_the_sum_is_the_allocators_peak(name: str) -> None:
    def make() -> Callable[[], None]:
        torch.manual_seed(0)
        return CASES[name](1).step

    torch.manual_seed(0)
    account = tracked(CASES[name](1))
    assert account.peak_bytes == counted_peak(make)
    assert sum(account.by_category().values()) == account.peak_bytes
    assert sum(sum(row.values()) for row in account.by_module().values()) == account.peak_bytes
    assert min(size for row in account.by_module().values() for size in row.values()) > 0


def test_modules_and_categories_of_a_gpt(tmp_path: Path) -> None:
    case = gpt()
    account = tracked(case)
    weights = sum(parameter.nbytes for parameter in case.model.parameters())
    assert account.by_category()["weights"] == weights
    modules = account.by_module()
    block = sum(parameter.nbytes for parameter in case.model.get_submodule("blocks.0").parameters())
    rolled = account.by_module(depth=2)
    assert rolled["blocks.0"]["weights"] == rolled["blocks.1"]["weights"] == block
    assert list(account.by_module(depth=1)) == [
        "words",
        "places",
        "blocks",
        "norm",
        "head",
        "outside of modules",
    ]
    # A linear layer keeps its input, which the module before has made; gelu, which is no module, keeps its own.
    assert modules["blocks.0.up"]["feature maps"] == 4 * 32 * 64 * 4
    assert modules["blocks.0.down"]["feature maps"] == 4 * 32 * 256 * 4
    console = Console(width=120)
    with console.capture() as capture:
        account.show(console=console)
    assert f"({account.peak_bytes:,} bytes), in the backward phase" in capture.get()
    path = tmp_path / "account.json"
    assert json.loads(account.to_json(path)) == json.loads(path.read_text())
    assert json.loads(path.read_text())["ledger"]["peak_bytes"] == account.peak_bytes


def test_an_account_is_read_after_the_block() -> None:
    with memory.track() as account, pytest.raises(InputError, match="read it after the block"):
        _ = account.peak_bytes
    with (
        pytest.raises(InputError, match="device 'meta' cannot be tracked; use cpu or cuda"),
        memory.track(device="meta"),
    ):
        pass
