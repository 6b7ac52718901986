"""Steps of programs that do not call the account: `memory.watch`, and scripts on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import econmt_memory as memory
from econmt_memory.__main__ import _size, run_prediction, run_script
from econmt_memory.account import watching
from econmt_memory.account.watching import live_models
from econmt_memory.callbacks import _Callback
from tests.conftest import run_python

GAN = """
import sys
import torch
from torch import nn

print(sys.argv[1:], __name__, __file__)
generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64))
critic = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizers = [torch.optim.Adam(each.parameters()) for each in (critic, generator)]
for _ in range(int(sys.argv[1])):
    made = generator(torch.randn(512, 16))
    for optimizer, images in zip(optimizers, (made.detach(), made)):
        optimizer.zero_grad()
        critic(images).mean().backward()
        optimizer.step()
sys.exit(3)
"""


@pytest.fixture(scope="module", autouse=True)
def _without_others() -> Iterator[None]:
    """Models of other tests, which live on in fixtures, belong to no step of these tests."""
    others = {id(each): each for each in live_models()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "live_models", lambda: [it for it in live_models() if id(it) not in others])
        yield


def perceptron() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)), torch.randn(512, 64)


@pytest.mark.parametrize("kind", ["adam", "closure", "lbfgs", "accumulated"])
def test_a_watched_step_counts_like_a_tracked_one(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, inputs = perceptron()
    parameters = list(model.parameters())
    adam, lbfgs = torch.optim.Adam(parameters), torch.optim.LBFGS(parameters, max_iter=2)
    optimizer = lbfgs if kind == "lbfgs" else adam

    def loss() -> Tensor:
        optimizer.zero_grad()
        for _ in range(3 if kind == "accumulated" else 1):
            result = model(inputs).square().mean()
            result.backward()
        return result

    def step() -> None:
        with torch.profiler.record_function("a step of the program"):
            if kind in ("closure", "lbfgs"):
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()

    with torch.no_grad(), memory.watch(None) as nothing:
        model(inputs)
    assert (nothing.steps, nothing.account, capsys.readouterr().err) == (0, None, "")
    with memory.watch(None, step=2) as watched:
        for _ in range(5):
            step()
    assert watched.steps == 2
    assert watched.account is not None
    with memory.track(model, optimizer) as account:
        step()
    rows = watched.account.by_module()
    assert rows["0"]["optimizer state"] > 0
    assert watched.account.ledger.timeline[-1].phase == "optimizer"
    if kind != "lbfgs":  # whose history grows
        assert rows == account.by_module()
        assert watched.account.peak_bytes == account.peak_bytes
    assert "Memory of a training step: feature maps 1.0 MB" in capsys.readouterr().err


def test_a_step_ends_with_the_last_of_several_optimizers() -> None:
    model, inputs = perceptron()
    optimizers = [torch.optim.SGD(model[number].parameters()) for number in (2, 0)]

    def update() -> None:
        for optimizer in optimizers:
            model(inputs).sum().backward()
            optimizer.step()

    with memory.watch(None, step=2) as watched:
        update()
        memory.predict(update, model, optimizers, device="cpu")
        update()
    assert watched.steps == 2
    assert watched.account is not None
    phases = groupby(event.phase for event in watched.account.ledger.timeline)
    assert [phase for phase, _ in phases].count("optimizer") == 2


def test_a_page_in_a_missing_folder_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="there is no folder for the page no/a"):
        memory.watch("no/a")


def test_of_several_processes_the_first_of_all_machines_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = perceptron()
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with memory.watch(None, step=1) as watched:
        model(inputs).sum().backward()
        optimizer.step()
    assert (watched.steps, watched.account) == (1, None)


def test_a_full_memory_is_told_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model, inputs), page = perceptron(), tmp_path / "page.html"
    watched = memory.watch(page)

    def fill() -> None:
        with watched:
            kept = model(inputs)
            kept += torch.empty(1 << 50)

    with pytest.raises(RuntimeError, match="allocate memory"):
        fill()
    assert (watched.steps, page.read_text().count("what would make room")) == (0, 1)
    told = capsys.readouterr().err
    assert told.startswith("The memory was full when 4503599.63 GB were requested; ")
    assert "What would make room: halve the batch 590.8 kB, " in told
    trainer = _Callback(None)
    trainer.on_train_start()
    with pytest.raises(RuntimeError, match="allocate memory") as error:
        kept = model(inputs) + torch.empty(1 << 50)  # noqa: F841
    trainer.on_exception(None, None, error.value)
    assert trainer.account is not None
    assert capsys.readouterr().err.startswith("The memory was full when ")

    def run_out() -> None:
        with watched:
            model(inputs)
            raise MemoryError

    with pytest.raises(MemoryError):
        run_out()
    assert watched.account is not None
    assert capsys.readouterr().err.startswith("The memory was full; the tables")
    with pytest.raises(ZeroDivisionError), memory.watch(page):
        model(inputs).sum() / (1 // 0)
    with torch.profiler.profile(), memory.watch(page) as refused:
        model(inputs)
    assert (refused.steps, "PyTorch's profiler runs already" in capsys.readouterr().err) == (0, True)


def test_a_script_runs_as_it_is_and_its_step_is_told(tmp_path: Path) -> None:
    script, page, file = (tmp_path / name for name in ("gan.py", "page.html", "account.json"))
    script.write_text(GAN)
    run = ("-m", "econmt_memory", "--html", page, "--json", file, script)
    done = run_python(*run, "4", "--html", "x", check=False)
    assert (done.returncode, done.stdout) == (3, f"['4', '--html', 'x'] __main__ {script}\n")
    told, table = done.stderr.split("\n", 1)
    assert told.startswith("Memory of a training step: feature maps 1.2 MB, ")
    assert told.partition("The largest modules: ")[2].partition(". What")[0].count(", ") == 2
    assert max(map(len, table.splitlines())) <= 80
    assert "where the bytes of a training step went" in done.stderr
    modules = json.loads(file.read_text())["modules"]
    assert (modules[0], len(modules), "<svg" in page.read_text()) == ("Sequential", 8, True)
    for size, count in {"2kB": 2000, "1.5MB": 1_500_000, "2kiB": 2048, "0.5GiB": 1 << 29}.items():
        assert _size(size) == count


@pytest.mark.slow
def test_a_script_that_ends_early_or_is_another_rank(tmp_path: Path) -> None:
    script = tmp_path / "gan.py"
    script.write_text(GAN)
    for steps, remedy in ((1, "try --step 1"), (0, "each needs modules in training mode and an update")):
        few = run_python("-m", "econmt_memory", script, str(steps), check=False)
        assert (few.returncode, few.stderr) == (3, f"{script} ended after {steps} steps; {remedy}\n")
    assert run_python("-m", "econmt_memory", script, "4", env={"RANK": "1"}, check=False).stderr == ""
    wrong = run_python("-m", "econmt_memory", script, "many", check=False)
    error = "ValueError: invalid literal for int() with base 10: 'many'"
    assert (wrong.returncode, wrong.stderr.splitlines()[-1]) == (1, error)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "missing.py: no such file"),
        (["--step", "0", __file__], "memory.watch: step 0 is not a step; the first one is 1"),
        (["--html", "no/page.html", __file__], "argument --html: there is no folder /"),
        (["predict", "--model", "c.json", "--json", "no/a.json"], "argument --json: there is no folder /"),
        (["predict", "--model", "c.json", "--batch", "0"], "--batch 0 --length 512: each must be 1 or more"),
        (["--step", "many", "x.py"], "argument --step: invalid int value: 'many'"),
        (["predict"], "the following arguments are required: --model"),
        (["predict", "--model", "x", "--fits", "2 cats"], "argument --fits: '2 cats' is no size such as"),
        (["predict", "--model", "no.json"], "no.json: "),
    ],
)
def test_a_wrong_command_is_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, rest = (run_prediction, words[1:]) if words[0] == "predict" else (run_script, words)
    name = "python -m econmt_memory" + " predict" * (words[0] == "predict")
    with pytest.raises(SystemExit, match="2"):
        run(rest)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"{name}: error: {message}")
    assert told.err.count("\n") == 1
    with pytest.raises(SystemExit, match="0"):
        run(["--help"])
    assert f"  {name} " in capsys.readouterr().out
