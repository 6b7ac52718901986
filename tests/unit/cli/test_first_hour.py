"""What a newcomer meets in the first hour: doctor, help, completion, quiet commands, lines to paste after training."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import re
import shlex
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tomllib
import torch
from rich.console import Console

from econmt.cli import doctor
from econmt.cli.doctor import EXTRAS, REQUIRED
from econmt.cli.train import commands_for
from econmt.config.recipe import Recipe, read_recipe
from econmt.config.suggestions import FOREIGN, meant_keys
from econmt.config.yaml_reader import walk
from econmt.engine.devices import unused_kernels
from econmt.training import run as run_module
from econmt.training.run import run_recipe
from tests.conftest import ROOT, PlayGPU, fails_with
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.training.tiny import Run, metrics

KEYS = dict.fromkeys(key for key, _, _ in walk(Recipe))


def said(call: Call) -> str:
    """What the doctor says, in one line."""
    return " ".join(call("doctor").succeeded().out.split())


@pytest.mark.parametrize("verb", ["train", "bench select", "recipes", ""])
def test_help_of_a_verb_in_both_orders(call: Call, verb: str) -> None:
    help_first = call("help", *verb.split())
    assert help_first == call(*verb.split(), "--help")
    assert help_first.code == 0
    assert "Usage: econmt" in help_first.out


def test_options_of_translate_have_headings(call: Call) -> None:
    out = call("translate", "--help").out
    headings = re.findall(r"^(\S.*):$", out, re.MULTILINE)
    assert headings[:4] == ["Model", "Input", "Output", "Search"]
    assert headings[-1] == "Options"
    search = out.partition("\nSearch:\n")[2].partition("\n\n")[0]
    assert "--beam-size" in search
    assert "--device" not in search


def test_completion(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ECONMT_COMPLETE", "complete_bash")
    for typed, expected in {
        "econmt tr": {"train", "translate"},
        "econmt train --overw": {"--overwrite-output"},
        "econmt bench se": {"select"},
        "econmt train multi": {"multi30k"},
    }.items():
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
        assert set(call().out.split()) == expected


def test_quiet_leaves_results_and_warnings(call: Call, word_model: Path) -> None:
    text = "a b\nc. d. A e.\n"
    loud = call("translate", "-m", word_model, text=text)
    quiet = call("-q", "translate", "-m", word_model, text=text)
    assert quiet.out == loud.out
    assert "tokens/s" in loud.err
    assert quiet.err == "".join(line for line in loud.err.splitlines(True) if "warning: " in line)
    assert call("translate", "-m", word_model, text="a\n").err != ""


def test_a_quiet_run_prints_its_results_only(call: Call, text: Path, tmp_path: Path) -> None:
    made = Run(text, tmp_path / "run", ("training.max_updates=2",))
    ended = call("train", tmp_path / "run.yaml", "training.max_updates=2", "--quiet")
    assert (ended.code, ended.err) == (0, "")
    assert "validation BLEU" in ended.out
    assert made.folder.log.exists()


def test_the_key_that_was_meant_is_found() -> None:
    expected = {
        "training.batch_size": ["training.batch.size"],
        "batch_size": ["training.batch.size", "decoding.batch_size"],
        "training.lr": ["training.optimizer.learning_rate"],
        "lerning_rate": ["training.optimizer.learning_rate"],
        "trainning": ["training"],
        "training.beam_size": ["decoding.beam_size"],
        "model.dropout_embedding": ["model.dropout.embedding"],
        "training.checkpoint-interval": ["training.checkpoint_interval"],
        "decoding.lenpen": ["decoding.length_penalty_alpha"],
        "xyzzy": [],
    }
    assert {wrong: meant_keys(wrong.split("."), KEYS) for wrong in expected} == expected


def test_an_option_that_is_a_recipe_key_leads_to_it(call: Call) -> None:
    for words, said in {
        "train --batch-size": "set without dashes: training.batch.size=VALUE or decoding.batch_size=VALUE; see",
        "train --lr": "set without dashes: training.optimizer.learning_rate=VALUE; see econmt train --help",
        "profile --memory-budget": "set without dashes: training.memory_budget=VALUE; see econmt profile",
        "train --epochs": "set without dashes: training.max_epochs=VALUE; see econmt train --help",
        "train --data-dri": "No such option: --data-dri (Possible options: --data-dir); see econmt train",
        "train --outpt": "No such option: --outpt (Possible options: --output); see econmt train --help",
        "train --xyzzy": "No such option: --xyzzy; see econmt train --help",
        "average --lr": "; see econmt average --help",
    }.items():
        ended = call(f"{words} 32 multi30k")
        refused(ended, said)
        assert ("without dashes" in said) == ("without dashes" in ended.err)


def test_names_of_other_toolkits_lead_to_keys() -> None:
    assert set(FOREIGN.values()) <= set(KEYS)
    assert not {name for name in FOREIGN if name in Recipe.model_fields}


def test_a_recipe_without_its_ending(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("name: x\n")
    for name in ("mine", "mine.yml"):
        refused(call("train", name), f"{name}: no such recipe, but mine.yaml is there; give its whole name")


def test_doctor(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=12_340_000_000))
    ended = call("doctor")
    assert ended.code == 0, ended.out
    assert "C library" in ended.out
    assert "econmt runs here" in ended.out
    assert max(map(len, ended.lines)) <= 80
    found = json.loads(call("doctor", "--json").out)
    assert found["torch"]["state"] == "ok"
    assert found["disk"]["text"].startswith("12.3 GB free in ")
    assert found["threads"]["text"].endswith("cores" if "OMP" not in ended.out else found["threads"]["text"])


def test_doctor_without_torch(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> ModuleType:
        if name == "torch":
            raise error
        return importlib.import_module(name)

    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=fails, util=importlib.util))
    message = "libtorch_cpu.so: cannot open shared object file"
    for error in (ImportError(message), NameError("libtorch_cpu.so, '_C'")):  # noqa: B007
        ended = call("doctor")
        assert ended.code == 1
        for words in ("error torch", "libtorch_cpu.so", "econmt cannot run here"):
            assert words in ended.out


def test_doctor_on_old_torch(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    requirement = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, doctor.LEAST_TORCH))}" in requirement
    for version, code in (("2.6.0+cu124", 1), ("2.7.0", 0), ("2.10.0a0+git1", 0)):
        monkeypatch.setattr("torch.__version__", version)
        ended = call("doctor")
        assert ended.code == code
        assert (f"{version}, too old" in ended.out) == bool(code)


def test_doctor_in_a_folder_that_was_removed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = fails_with(FileNotFoundError(2, "No such file or directory"))
    monkeypatch.setattr(doctor.Path, "cwd", classmethod(removed))
    assert "the folder of this shell was removed" in said(call)


def test_doctor_where_much_is_missing(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacking = {"triton", "uvicorn", "py3langid"}
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacking else real(name))
    monkeypatch.setattr("econmt_ops.backends.c.is_built", lambda: False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    ended = call("doctor").succeeded()
    notes = {line.split()[1] for line in ended.lines if line.startswith("note")}
    assert {"C", "compiler", "[serve]", "[language]", "cache"} <= notes
    text = " ".join(ended.out.split())
    assert "not available: econmt serve; pip install 'econmt[serve]'" in text
    assert "every command measures anew what is fastest" in text
    assert "translates two to three times as slowly" in text


@pytest.mark.parametrize("cuda", [None, "12.8"])
def test_doctor_tells_why_a_gpu_is_not_used(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    doctor.DRIVER.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.1\n")
    out = said(call)
    reason = "built without CUDA; install a build with CUDA" if cuda is None else "older than CUDA 12.8"
    assert "x86_64 Kernel Module 470.1" in out
    assert reason in out


@pytest.mark.parametrize(("module", "maker"), [("mps", "Apple"), ("xpu", "Intel")])
def test_doctor_on_other_gpus(call: Call, monkeypatch: pytest.MonkeyPatch, module: str, maker: str) -> None:
    owner = torch.backends.mps if module == "mps" else torch.xpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(owner, "is_available", lambda: True)
    text = f"GPU {maker}'s, which torch calls {module} econmt does not use {maker}'s GPUs; training and translating run"
    assert text in said(call)


def test_doctor_on_a_gpu_of_amd(call: Call, play_gpu: PlayGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu("AMD Radeon RX 7900 XT", 11, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    out = said(call)
    for words in (
        "built for ROCm 6.4",
        "note GPU AMD Radeon RX 7900 XT, 13 GB AMD's GPUs run PyTorch's operations, with the same resul",
        "ok driver that of ROCm ok C library",
        "ok Triton not used on AMD's GPUs",
    ):
        assert words in out
    why = "they are made for NVIDIA's GPUs and are not tested with ROCm; its operations run as calls of"
    assert why in unused_kernels(torch.device("cuda", 0))
    assert unused_kernels(torch.device("cpu")) is None


@pytest.mark.parametrize("capability", [(7, 5), (8, 6)])
def test_doctor_on_a_gpu_before_ampere(call: Call, play_gpu: PlayGPU, capability: tuple[int, int]) -> None:
    play_gpu("NVIDIA GeForce RTX", *capability)
    out = said(call)
    warning = unused_kernels(torch.device("cuda", 0))
    why = "econmt's GPU kernels are not used: they need compute capability 8.0, and this GPU has 7.5; "
    assert (why + "the GPU runs PyTorch's operations, with the same results and more slowly" in out) == (
        capability == (7, 5)
    )
    assert (warning or "").startswith(why) == (capability == (7, 5)) == (warning is not None)


def test_the_doctor_knows_the_extras_and_packages_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"docs", "test", "web"}

    def names(requirements: list[str]) -> list[str]:
        return [re.split("[>=<]", each)[0].replace("-", "_") for each in requirements]

    for name, (modules, _) in EXTRAS.items():
        assert list(modules) == names(extras[name])
    # Without the others not even the command line starts.
    others = {"torch", "pyyaml", "pydantic", "typer", "rich"}
    assert set(REQUIRED.values()) == set(names(project["dependencies"])) - others


def test_next_steps_work(call: Call, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Run(text, tmp_path / "a run", ("training.max_updates=2",))
    changes = f"data.test={text}/test", f"output={tmp_path}/a run"
    command = "train 'a run.yaml' training.max_updates=2", *changes
    ended = call(*command)
    steps = [line.strip() for line in ended.err.partition("with this model:\n")[2].splitlines()]
    verbs = [re.search(r"econmt (\w+)", step)[1] for step in steps]  # type: ignore[index]
    assert verbs == ["translate", "translate", "evaluate", "serve"]
    piped, *others = steps
    sentence = shlex.split(piped)[1]
    assert call(*shlex.split(piped)[4:], text=sentence).code == 0
    for step in others[:2]:
        ran = call(*shlex.split(step)[1:]).succeeded()
    assert "BLEU" in ran.out
    again = call(*command)
    (line,) = again.lines
    assert line.startswith(
        f"{tmp_path}/a run: finished at update 2 (max_updates 2 reached), best checkpoint "
    )
    assert "nothing to do" in line
    assert again.err.startswith("with this model:\n")
    assert steps[1] in again.err


def test_lines_for_a_model_with_source_factors(word_model: Path) -> None:
    recipe = read_recipe(word_model / "recipe.yaml")
    data = recipe.pairs.model_copy(update={"source_factors": ["pos", "case"], "prepared": "p"})
    first, second = commands_for(recipe.model_copy(update={"data": data, "output": "m"}), "a")
    factors = "--input-factors p/valid.factor1.txt --input-factors p/valid.factor2.txt"
    assert first.endswith(f"{factors} -o m.valid.trg")
    assert second == "econmt evaluate -r p/valid.target.txt -i m.valid.trg"


def test_everything_before_an_update_counts_for_max_seconds(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(text, tmp_path / "run", ("training.max_seconds=5000",))
    real = run_module.prepare

    def slow(*arguments: Any, **settings: Any) -> Any:
        monkeypatch.setattr("time.monotonic", lambda now=run_module.time.monotonic: now() + 6000.0)
        return real(*arguments, **settings)

    monkeypatch.setattr(run_module, "prepare", slow)
    outcome = run_recipe(run.recipe, [text], console=run.console)
    assert outcome.training.reason == "max_seconds 5000 reached"
    assert outcome.training.update == outcome.training.best_update == 1
    assert metrics(run.folder)[0]["seconds"] > 5999
    assert outcome.results is not None


def test_a_run_in_a_pipe_says_its_stage(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Beating(run_module.Heartbeat):
        """Prints nothing, but notes every activity."""

        def say(self, text: str) -> None:
            said.append(text)

    monkeypatch.setattr(run_module, "Heartbeat", Beating)
    run = Run(text, tmp_path / "run", ("training.max_updates=2", f"data.test={text}/test"))
    run_recipe(run.recipe, [text], console=Console(file=io.StringIO()))
    expected = [
        "preparing the text",
        "measuring what is fastest here",
        "training: update 1",
        "validation: computing the perplexity",
        "validation: 6 of 6 sentences translated",
        "measuring the memory of a training step",
        "scoring the test text: 12 of 12 sentences translated",
    ]
    assert [each for each in said if each in expected] == expected
