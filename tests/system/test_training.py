"""Training through the command line, on text so small that a model learns it in seconds."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from econmt.checkpoint.folder import Commit, ModelFolder
from econmt.cli.main import main
from tests.conftest import PATIENCE

RECIPE = """
name: reverse
output: {folder}/run
data: {{source: src, target: trg, train: [train], valid: valid, test: test, subwords: {{type: words}}}}
model:
  embedding: 32
  encoder: {{size: 64}}
  decoder: {{size: 64}}
  attention: {{size: 64}}
training:
  batch: {{size: 32}}
  optimizer: {{learning_rate: 0.008}}
  max_updates: 400
  checkpoint_interval: 100
  device: cpu
  threads: 1
decoding: {{beam_size: 2, max_output_factor: 1.0}}
"""
SMALL = (
    *(f"model.{name}=8" for name in ("embedding", "encoder.size", "decoder.size", "attention.size")),
    *("training.batch.size=4", "training.checkpoint_interval=2", "training.max_updates=4"),
)
NEVER = (f"training.{name}=1000000" for name in ("max_updates", "checkpoint_interval"))
ENDLESS = (*SMALL, *NEVER, "training.log_interval=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = random.Random(4)
    for name, count in (("train", 2500), ("valid", 40), ("test", 40)):
        lines = [[draw.choice("abcdefgh") for _ in range(draw.randint(2, 7))] for _ in range(count)]
        (tmp_path / f"{name}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        backwards = "".join(" ".join(reversed(line)).upper() + "\n" for line in lines)
        (tmp_path / f"{name}.trg").write_text(backwards)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    return tmp_path


def train(folder: Path, *words: str) -> int:
    """Runs ``econmt train`` in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["train", str(folder / "recipe.yaml"), *words])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def start(folder: Path, words: Sequence[str], **options: object) -> subprocess.Popen[str]:
    """Starts ``econmt train`` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    command = [sys.executable, "-m", "econmt", "train", str(folder / "recipe.yaml"), *words]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, env=environment, **pipes)


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_a_model_learns_to_reverse(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder) == 0
    said = capsys.readouterr()
    run = ModelFolder(folder / "run")
    header, *rows = (line.split("\t") for line in run.metrics.read_text().splitlines())
    best = min(rows, key=lambda row: float(row[header.index("valid_perplexity")]))
    assert float(best[header.index("valid_perplexity")]) < 1.3
    hypotheses = run.test_hypotheses.read_text().splitlines()
    score = sacrebleu.corpus_bleu(hypotheses, [(folder / "test.trg").read_text().splitlines()])
    assert score.score > 80
    last = f"test BLEU {score.score:.2f} of checkpoint {best[0]} (nrefs:1|case:mixed|eff:no|tok:13a|"
    assert said.out.splitlines()[-1].startswith(last)
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


def test_a_finished_run_says_so_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, *SMALL) == 0
    capsys.readouterr()
    assert train(folder, *SMALL) == 0
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    assert line.startswith(f"{folder}/run: finished at update 4 (max_updates 4 reached), best checkpoint ")
    assert said.err.startswith("with this model:\n")
    assert train(folder, *SMALL, "training.max_updates=6") == 0
    assert "resuming from update 4" in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("number", "name", "code"), [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)]
)
def test_signals_save_and_leave(folder: Path, number: int, name: str, code: int) -> None:
    process = start(folder, ENDLESS)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("update 3 "):
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (code, "")
    saved = rf"econmt: {name}: saved at update (\d+) in {folder}/run; run the same command to resume"
    found = re.fullmatch(saved, err.splitlines()[-1])
    assert found is not None, err
    assert ModelFolder(folder / "run").commits() == [Commit(int(found[1]), False)]


@pytest.mark.slow
def test_the_second_ctrl_c_leaves_at_once(folder: Path) -> None:
    # An update of ten thousand batches: the first signal waits for its end.
    process = start(folder, (*ENDLESS, "training.update_interval=10000", "training.max_updates=1"))
    assert process.stderr is not None
    process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert ModelFolder(folder / "run").commits() == []


def limit_files(size: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "model.decoder.size=64", "data.test=null")
    assert train(folder, *words) == 0
    run = ModelFolder(folder / "run")
    size = run.best.stat().st_size
    before = {path.name: path.read_bytes() for path in run.path.glob("*.safetensors")}
    longer = (*words, "training.max_updates=6")
    process = start(folder, longer, preexec_fn=lambda: limit_files(size - 1000))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    last = err.splitlines()[-1]
    assert last.startswith(f"econmt: error: {folder}/run: cannot save the checkpoint of update 6 (")
    assert "the checkpoint of update 4 is intact; allow larger files (ulimit -f) and run the same" in last
    assert "Traceback" not in err
    assert {path.name: path.read_bytes() for path in run.path.glob("*.safetensors")} == before
    assert train(folder, *longer) == 0
    assert run.commits() == [Commit(4, True), Commit(6, True)]


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command refuses; nothing else is said and nothing is printed as a result."""
    capsys.readouterr()
    assert train(folder, *words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    line = said.err.splitlines()[-1]
    assert line.startswith("econmt: error: ")
    assert "Traceback" not in said.err
    return line.removeprefix("econmt: error: ")


def test_a_folder_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(folder, capsys, "--output", str(folder / "train.src" / "run"))
    assert line.startswith(f"{folder}/train.src/run: the model folder cannot be written (")


def test_bad_checkpoints_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, *SMALL) == 0
    run = ModelFolder(folder / "run")
    longer = (*SMALL, "training.max_updates=6")
    shutil.rmtree(run.state(Commit(2, True)))  # so that there is none to fall back to
    newest = run.parameters(4)
    whole = newest.read_bytes()
    trap = folder / "trap"

    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (trap,))

    damages = [
        (whole[:-100], "truncated or broken safetensors file"),
        (whole[:50], "truncated safetensors file"),
        (b"", "not a safetensors file"),
        (pickle.dumps(Hostile()), "is a pickle; econmt never loads pickles"),
        (
            whole.replace(b'"econmt-1"', b'"foreign1"'),
            "not a file of econmt (format foreign1, expected econmt-1)",
        ),
    ]
    for content, message in damages:
        run.best.unlink(missing_ok=True)  # a hard link to the same file
        newest.unlink()
        newest.write_bytes(content)
        line = refused(folder, capsys, *longer)
        assert line.startswith(str(newest))
        assert message in line
    assert not trap.exists()
    newest.write_bytes(whole)
    assert train(folder, *longer) == 0


@pytest.mark.slow
def test_a_changed_recipe_is_refused_by_default(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, *SMALL) == 0
    longer = (*SMALL, "training.max_updates=6")
    line = refused(folder, capsys, *longer, "training.optimizer.learning_rate=0.5")
    changed = "training.optimizer.learning_rate 0.008 -> 0.5; "
    assert line.startswith(f"{folder}/run: was trained with another recipe: {changed}")
    line = refused(folder, capsys, *longer, "model.encoder.size=16", "--resume-with-changes")
    assert "has shape" in line
    assert "belongs to another model" in line
    assert train(folder, *longer, "training.optimizer.learning_rate=0.5", "--resume-with-changes") == 0
    assert train(folder, *SMALL, "model.encoder.size=16", "--overwrite-output") == 0


def test_a_dry_run_describes_and_trains_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "--dry-run") == 0
    said = capsys.readouterr().out
    assert re.match(r"\S+: would start a new run in \S+, on cpu\ntrains on 2,500 pairs of ", said)
    assert "nothing is trained now" in said
    assert "InputFeedingDecoder" in said
    assert "vocabulary: 12 source, 12 target" in said
    assert "2,500 pairs in " in said
    layers = dict(re.findall(r"│ (\w+) +│ +([\d,]+) │\n", said))
    total = re.search(r"parameters: ([\d,]+)", said)
    assert total is not None
    assert sum(int(count.replace(",", "")) for count in layers.values()) == int(total[1].replace(",", ""))
    assert ModelFolder(folder / "run").commits() == []


def test_loss_that_is_not_finite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "training.optimizer.name=sgd", "training.gradient_clipping.type=none", "data.test=null")
    assert train(folder, *words, "training.optimizer.learning_rate=1.0e-3") == 0
    capsys.readouterr()
    wrong = "training.optimizer={name: sgd, learning_rate: 1000, weight_decay: 1000}"
    longer = "training.max_updates=40", "training.checkpoint_interval=100"
    assert train(folder, *words, wrong, *longer, "--resume-with-changes") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    told = r"econmt: error: the (loss|gradient) is not finite at update \d+, pairs \S+train\.src:\d+, "
    assert re.match(told, line), line
    assert "the last good checkpoint is update 4" in line
    assert ModelFolder(folder / "run").commits() == [Commit(2, True), Commit(4, True)]
