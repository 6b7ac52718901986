"""Accounts and predictions with libraries around PyTorch, which are left out where they are not installed."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.futures import collect_all
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import econmt_memory as memory
from econmt_memory.__main__ import run_prediction
from tests.conftest import ROOT, run_python
from tests.unit.memory.account.models import counted_peak

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
SIZES["vocab_size"] = 200
KINDS = "reentrant", "without reentry", "peft", "torchao", "bitsandbytes"


class Residual(nn.Module):
    """Blocks that may be recomputed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.blocks, self.kind = nn.ModuleList(blocks), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            recompute = partial(checkpoint, block, use_reentrant=self.kind == "reentrant")
            x = x + (recompute if self.kind in KINDS[:2] else block)(x)
        return x


def training(kind: str, wrap: Callable[[nn.Module], Any] = lambda model: model) -> tuple[Any, ...]:
    """Returns a model, its optimizer and the function that trains."""
    torch.manual_seed(0)
    model, make = wrap(Residual(kind)), torch.optim.AdamW
    if kind == "peft":
        peft = pytest.importorskip(kind)
        targets = [f"blocks.{number}.0" for number in range(3)]
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=4))
    elif kind in KINDS[3:]:
        make = pytest.importorskip(f"{kind}.optim").AdamW8bit
    inputs = torch.randn(256, 64, requires_grad=kind == "reentrant")
    optimizer = make([each for each in model.parameters() if each.requires_grad])

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_save_memory_are_tracked_to_the_byte_and_predicted(kind: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # as predictions count
        model, optimizer, step = training(kind)
        predicted = memory.predict(step, model, optimizer, device="cpu")
        step()
        step()
        with memory.track(model, optimizer) as account:
            step()
        assert account.peak_bytes == counted_peak(lambda: training(kind)[2])
    for category in ("optimizer state", "other", "weights"):
        assert account.by_category()[category] == predicted.by_category()[category]
    # The states of random numbers that checkpoints keep are missing.
    assert predicted.peak_bytes == pytest.approx(account.peak_bytes, rel=0.01)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_parallel_training_is_tracked_to_the_byte_and_predicted(is_sharded: bool) -> None:
    # Exchanges are pretended: the threads of real ones free memory where the profiler does not see it.
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    distributed.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    mesh, done = init_device_mesh("cpu", (2,)), collect_all([])

    def wrap(model: nn.Module) -> Any:
        if not is_sharded:
            parallel = DistributedDataParallel(model)
            parallel.register_comm_hook(None, lambda _, bucket: done.then(lambda _: bucket.buffer()))
            return parallel
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    try:
        model, optimizer, step = training("plain", wrap)
        if is_sharded:
            with pytest.raises(ValueError, match="step must make a model of fully_shard"):
                memory.predict(step, model, device="cpu")
            predicted = memory.predict(lambda: training("plain", wrap)[2], device="cpu")
        else:
            predicted = memory.predict(step, model, optimizer, device="cpu")
        step()
        step()
        with memory.track(model, optimizer) as account:
            step()
        size = sum(each.nbytes for each in model.parameters()) // (1 + is_sharded)
        categories = account.by_category()
        assert categories["weights"] == size
        assert 2 * size <= categories["optimizer state"] < 2.01 * size
        assert [name.partition(".")[2] for name in account.by_module(2)][:2] == ["0", "1"]
        assert is_sharded or categories["other"] >= size  # buckets of gradients, which are there before
        assert account.peak_bytes == counted_peak(lambda: training("plain", wrap)[2])
        assert predicted.peak_bytes == pytest.approx(account.peak_bytes, abs=12)
    finally:
        distributed.destroy_process_group()


def config(path: Path, **values: Any) -> Path:
    values = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZES, **values}
    path.write_text(json.dumps(values))
    return path


def test_a_step_is_predicted_from_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    file, page = tmp_path / "account.json", tmp_path / "page.html"
    # Code that is named elsewhere is not looked for.
    path = config(tmp_path / "c.json", auto_map={"AutoModel": "x.Model"}, attn_implementation="no/kernel")
    command = ["--model", str(path), "--batch", "4", "--length", "32", "--device", "cpu"]
    assert run_prediction([*command, "--json", str(file), "--html", str(page), "--budget", "1MB"]) == 1
    assert "Bytes that are needed: 3.0 MB, of 1.0 MB." in capsys.readouterr().out
    ids = torch.zeros(4, 32, dtype=torch.int64)
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    step()
    step()
    with memory.track(model, optimizer) as account:
        step()
    assert memory.compare(account, file).grown == 0
    assert "<svg" in page.read_text()
    options = ["--dtype", "bfloat16", "--optimizer", "sgd", "--checkpointing", "--fits", "20MB"]
    assert run_prediction([*command, *options]) == 0
    assert "20.0 MB hold " in capsys.readouterr().out


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ValueError: Unrecognized model identifier": {"model_type": "no such model"},
    "TypeError: architectures names no model with a loss": {"architectures": ["BertModel"]},
    "StrictDataclass": {"hidden_size": "x"},
}


@pytest.mark.parametrize("message", CONFIGURATIONS)
def test_a_configuration_that_is_none_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], message: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match="2"):
        run_prediction(["--model", str(config(tmp_path / "c.json", **CONFIGURATIONS[message]))])
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"python -m econmt_memory predict: error: {tmp_path / 'c.json'}: {message}")


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
def test_examples_of_the_readme(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    library: str,
    is_full: bool,
) -> None:
    pytest.importorskip(library)
    blocks = re.findall("(?ms)^```python\n(.*?)^```", (ROOT / "memory/README.md").read_text())
    (example,) = (block for block in blocks if re.search(f"(?m)^(from|import) {library}", block))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("shown", file=sys.stderr))

    def fill(module: nn.Module, *_: Any) -> None:
        if is_full and "GELU" in type(module).__name__:
            torch.empty(1 << 50)

    hook = register_module_forward_hook(fill)
    try:
        exec(example, {"__name__": "example"})
    except RuntimeError:
        if library == "transformers":  # the only one that waits for the end of the program
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        hook.remove()
    told, page = capsys.readouterr().err, (tmp_path / "memory.html").read_text()
    assert ("The memory was full when 4503599.63 GB were requested; " in told) == is_full
    assert ("Memory of a training step: " in told, "<svg" in page) == (True, True)
    assert ("shown" in told.splitlines()) == (is_full and library == "transformers")


SHARDED = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
model = fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_tell_of_the_first(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "account.json"
    script.write_text(SHARDED)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    done = run_python(*launch, "econmt_memory", "--json", file, script)
    assert done.stderr.count("where the bytes of a training step went") == 1
    sizes: Counter[str] = Counter()
    for entry in json.loads(file.read_text())["ledger"]["entries"]:
        sizes[entry["category"]] += entry["bytes"]
    weights = 4 * (2 * 64 * 256 + 256 + 64) // 2
    assert (sizes["weights"], sizes["optimizer state"]) == (weights, 2 * weights + 4 * 4)
