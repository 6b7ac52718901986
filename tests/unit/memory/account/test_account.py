"""The memory account of any model adds up to what the allocator gives out, to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import econmt_memory as memory
from tests.unit.memory.account.models import CASES, Case, counted_peak, gpt, next_word_loss, tracked


def test_modules_and_categories_of_a_gpt(tmp_path: Path) -> None:
    case = gpt()
    account = tracked(case)
    weights = sum(parameter.nbytes for parameter in case.model.parameters())
    assert account.by_category()["weights"] == weights
    modules = account.by_module()
    block = sum(parameter.nbytes for parameter in case.model.get_submodule("blocks.0").parameters())
    rolled = account.by_module(depth=2)
    assert rolled["blocks.0"]["weights"] == rolled["blocks.1"]["weights"] == block
    modules_of = ["words", "places", "blocks", "norm", "head", "outside of modules"]
    assert list(account.by_module(depth=1)) == modules_of
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
    with memory.track() as account:
        with pytest.raises(ValueError, match="read it after the block"):
            _ = account.peak_bytes
        with pytest.raises(ValueError, match="the memory account is complete when its with block has ended"):
            account.advice()
    message = "device 'meta' cannot be tracked; use cpu or cuda"
    with pytest.raises(ValueError, match=message), memory.track(device="meta"):
        pass


def test_what_is_recomputed_is_a_feature_map_again() -> None:
    plain, checkpointed = tracked(gpt(passes=1)), tracked(gpt(checkpointed=True))
    stash = checkpointed.ledger.stash
    # Between the passes, the blocks keep nothing, and the model their inputs: embeddings and the first result.
    assert not [name for name in stash if name.startswith("blocks")]
    assert stash["GPT"] == 2 * 4 * 32 * 64 * 4
    assert checkpointed.ledger.stashed < plain.ledger.stashed
    tracker = checkpointed._tracker
    backward = [change for change in tracker.changes[tracker.begins[1].changes :] if change.size > 0]
    assert ("blocks.0.down", "aten.gelu") in {
        (each.storage.kept_by, each.storage.operator) for each in backward
    }
    assert not [each for each in tracker.alive(len(tracker.changes)) if each.kept_by and each.operator]


def test_gradients_are_known_though_they_are_cleared_within_the_block() -> None:
    case = gpt()
    case.step()
    with memory.track(case.model, case.optimizer) as account:
        case.optimizer.zero_grad()
        case.loss().backward()  # type: ignore[no-untyped-call]
        case.optimizer.zero_grad(set_to_none=True)
        made = torch.zeros(10_000_000)  # the peak
    assert account.by_category()["gradients"] == 0
    assert account.by_module()["outside of modules"]["workspace"] == made.nbytes
    assert account.names[0] == "GPT"
    with memory.track(case.model, case.optimizer) as account:
        case.loss().backward()  # type: ignore[no-untyped-call]
        made = torch.zeros(10_000_000)
    assert account.by_category()["gradients"] == account.by_category()["weights"]


def test_an_unknown_model_is_named_when_it_runs() -> None:
    case = gpt()
    with memory.track() as account:
        case.step()
    assert account.by_category()["weights"] == sum(parameter.nbytes for parameter in case.model.parameters())
    assert account.by_category()["optimizer state"] > 0
    assert list(account.by_module(1))[:2] == ["words", "places"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_the_sum_is_the_allocators_peak_and_predictions_agree(name: str) -> None:
    def make() -> Case:
        torch.manual_seed(0)
        return CASES[name](1)

    case = make()
    of_gpu = memory.predict(case.step, case.model, case.optimizer, nonzero=0.25)
    predicted = memory.predict(case.step, case.model, case.optimizer, device="cpu", nonzero=0.25)
    account = tracked(make())
    for each in (account, predicted, of_gpu):
        assert sum(each.by_category().values()) == each.peak_bytes
    assert sum(sum(row.values()) for row in account.by_module().values()) == account.peak_bytes
    assert min(size for row in account.by_module().values() for size in row.values()) > 0
    assert account.peak_bytes == counted_peak(lambda: make().step)
    assert predicted.peak_bytes == pytest.approx(account.peak_bytes, rel=0.02)
    for category in ("weights", "optimizer state"):
        assert predicted.by_category()[category] == account.by_category()[category]
    parameters = list(case.model.parameters())
    blocks = len(parameters) + 2 * len(list(case.model.buffers()))
    assert 0 <= of_gpu.by_category()["weights"] - sum(each.nbytes for each in parameters) <= 512 * blocks
    assert of_gpu.ledger.stashed > 0


def test_a_prediction_of_a_gpu_from_code_that_makes_everything_itself() -> None:
    def training() -> Callable[[], None]:
        model = torch.nn.Linear(1000, 1000, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            loss = model(torch.randn(8, 1000).to("cuda").cuda()).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    account = memory.predict(training)
    # Blocks of 512 bytes: 4,000 bytes of a bias are 4,096.
    assert account.by_category()["weights"] == 4_000_256 + 4_096
    assert account.ledger.device == "cuda"
    assert 0 <= account.ledger.allocated - account.peak_bytes < 2_000_000, "parts of blocks are unused"
    with pytest.raises(ValueError, match="device 'tpu' is unknown; use cpu or cuda"):
        memory.predict(training, device="tpu")
    with pytest.raises(ValueError, match="nonzero 2 is no share; give a number from 0 to 1"):
        memory.predict(training, nonzero=2)


@pytest.mark.parametrize("name", ["checkpointing", "encoder-decoder"])
def test_a_tracked_step_computes_the_same_bits(name: str) -> None:
    results = []
    for is_tracked in (False, True):
        torch.manual_seed(0)
        case = CASES[name](1)
        with memory.track(case.model) if is_tracked else nullcontext():
            case.step()
        results.append([parameter.detach() for parameter in case.model.parameters()])
    for plain, followed in zip(*results, strict=True):
        assert torch.equal(plain, followed)


@pytest.mark.parametrize("fails", [False, True])
def test_a_compiled_module_is_entered_and_then_as_before(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh())
    compiled = model[0]._call_impl
    model[0]._compiled_call_impl = compiled
    for _ in range(2):
        with suppress(KeyError), memory.track(model) as account:
            model(torch.ones(8, 40)).sum().backward()
            if fails:
                raise KeyError
        assert model[0]._compiled_call_impl is compiled
        assert account.by_module()["0"]["weights"] == 4 * 50 * 41
        assert "0 is compiled: what it computes is one row." in account.notes


@pytest.mark.slow
def test_compiled_modules_are_one_row() -> None:
    case = gpt()
    for block in case.model.get_submodule("blocks").children():
        block.compile(backend="aot_eager")
    account = tracked(case)
    modules = account.by_module()
    assert modules["blocks.0"]["feature maps"] > 400_000
    assert "feature maps" not in modules["blocks.0.up"]
    assert "blocks.0 is compiled: what it computes is one row." in account.notes
    compiled = torch.compile(case.model, backend="aot_eager")
    ids = torch.zeros(4, 32, dtype=torch.int64)
    next_word_loss(compiled, ids).backward()  # type: ignore[no-untyped-call]
    with memory.track(compiled) as account:
        next_word_loss(compiled, ids).backward()  # type: ignore[no-untyped-call]
    assert account.names[0] == "GPT"
    assert account.by_category()["weights"] == sum(each.nbytes for each in case.model.parameters())


def test_a_prediction_of_autocast_on_a_gpu_follows_its_list_of_functions() -> None:
    """On a GPU, layer normalization returns float32, which the next product casts to bfloat16."""

    def peak(kind: torch.dtype | None) -> int:
        def training() -> Callable[[], None]:
            layers = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64))
            inputs = torch.ones(512, 64)

            def step() -> None:
                with torch.autocast("cuda", kind, enabled=kind is not None):
                    layers(inputs).sum().backward()
                layers.zero_grad()

            return step

        return memory.predict(training).ledger.stashed

    rows = 512
    # In bfloat16 inputs, normalized values, and the weight of the second product; in float32 the first product as the
    # normalization reads it, and its statistics. Inputs without autocast were there before.
    weights = 2 * 256 * 64
    assert peak(torch.bfloat16) == rows * (64 * 2 + 256 * 4 + 256 * 2 + 2 * 4) + weights
    assert peak(None) == rows * (256 * 4 + 256 * 4 + 2 * 4)
