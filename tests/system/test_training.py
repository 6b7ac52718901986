"""Training through the command line, on text so small that a model learns it in seconds."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from econmt.checkpoint.folder import Commit, ModelFolder
from tests.conftest import PATIENCE, econmt_environment
from tests.unit.cli.conftest import Call, call  # noqa: F401
from tests.unit.training.tiny import metrics, write_recipe, write_text

LEARNS = """model.embedding=32 model.encoder.size=64 model.decoder.size=64 model.attention.size=64 model.dropout=0
training.batch.size=32 training.optimizer.learning_rate=0.008 training.max_updates=400
training.checkpoint_interval=100 training.log_interval=50 decoding.max_output_factor=1.0"""
ENDLESS = "training.max_updates=1000000 training.checkpoint_interval=1000000 training.log_interval=1"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with its text; its model is ``run`` in the same folder."""
    write_text(tmp_path, {"train": 2500, "valid": 40, "test": 40})
    return write_recipe(tmp_path / "recipe.yaml", tmp_path, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_a_model_learns_to_reverse(recipe: Path, call: Call) -> None:  # noqa: F811
    folder, run = recipe.parent, ModelFolder(recipe.with_name("run"))
    said = call(f"train {recipe} {LEARNS} data.test={folder}/test").succeeded()
    best = min(metrics(run), key=lambda row: row["valid_perplexity"])
    assert best["valid_perplexity"] < 1.3
    hypotheses = run.test_hypotheses.read_text().splitlines()
    score = sacrebleu.corpus_bleu(hypotheses, [(folder / "test.trg").read_text().splitlines()])
    assert score.score > 80
    last = (
        f"test BLEU {score.score:.2f} of checkpoint {best['update']:.0f} (nrefs:1|case:mixed|eff:no|tok:13a|"
    )
    assert said.lines[-1].startswith(last)
    assert (folder / "test.src").read_text().splitlines()[0] in said.out
    assert hypotheses[0] in said.out
    pictures = re.findall(r"^picture: (.*)$", said.out, re.MULTILINE)
    assert [Path(picture).name for picture in pictures] == ["learning_curve.png", "attention.png"]
    assert all(Path(picture).stat().st_size > 1000 for picture in pictures)
    for word in ("feature", "maps", "optimizer", "attention", "encoder"):
        assert word in said.out
    assert "update 400" in said.err
    assert " tokens/s" in said.err
    assert said.err.count("at the speed of the first updates, without validation: an epoch takes about ") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("number", "name", "code"), [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)]
)
def test_signals_save_and_leave(recipe: Path, number: int, name: str, code: int) -> None:
    command = [sys.executable, "-m", "econmt", "train", str(recipe), *ENDLESS.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=econmt_environment(), **pipes) as process:
        for line in process.stderr:
            if line.startswith("update 3 "):
                process.send_signal(number)
                break
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (code, "")
    folder = recipe.with_name("run")
    saved = rf"econmt: {name}: saved at update (\d+) in {folder}; run the same command to resume"
    found = re.fullmatch(saved, err.splitlines()[-1])
    assert found is not None, err
    assert ModelFolder(folder).commits() == [Commit(int(found[1]), False)]
