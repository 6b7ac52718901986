"""Figures that decide which checkpoint is best, hooks, and runs with word alignments and weights of pairs."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path

import pytest
import torch

from econmt.cli.main import main
from econmt.config import limits
from econmt.errors import InputError
from econmt.model import TranslationModel
from econmt.training.hooks import HookError, Judged, program_hook
from econmt.training.run import run_recipe
from econmt.training.validation import validate
from tests.unit.training.tiny import MakeRun, Run, metrics, write_guides, write_text

PROGRAM = """
import json, os, sys
lines = sys.stdin.read().splitlines()
told = {name: os.environ["ECONMT_" + name] for name in ("SOURCE", "REFERENCE", "UPDATE")}
with open(sys.argv[1], "a") as log:
    log.write(json.dumps([lines, *told.values()]) + "\\n")
print("the figure is", -abs(int(told["UPDATE"]) - 4))
"""


def judged(folder: Path, *lines: str) -> Judged:
    return Judged(lines, folder / "s", folder / "r", 7)


def command(*words: object) -> str:
    return shlex.join([sys.executable, *map(str, words)])


def test_accuracy_counts_the_most_probable_tokens(make_run: MakeRun) -> None:
    run = make_run("training.early_stopping.metric=accuracy", "training.max_updates=6")
    trainer = run.trainer()
    model, task = trainer.model, trainer.task
    assert isinstance(model, TranslationModel)
    model.eval()
    right = total = 0
    with torch.no_grad():
        for batch in task.evaluation(trainer.prepared, "valid").batches:
            hidden = model(batch.source, batch.source_lengths, batch.target_input)
            best = (hidden @ model.output.weight.T + model.output.bias).argmax(-1)
            mask = batch.target_output != 0
            right += int((best == batch.target_output)[mask].sum())
            total += int(mask.sum())
    assert 0 < right < total
    found = validate(trainer.step, trainer.prepared).others["valid_accuracy"]
    assert found == pytest.approx(100 * right / total)
    run_recipe(run.recipe, [run.text], console=run.console)
    rows = metrics(run.folder)
    best_row = max(rows, key=lambda row: row["valid_accuracy"])
    assert f"best checkpoint {best_row['update']:.0f}" in run.said()
    assert f"accuracy {rows[-1]['valid_accuracy']:.4f}" in run.said()


def test_a_program_judges_checkpoints(make_run: MakeRun, tmp_path: Path) -> None:
    program, log = tmp_path / "judge.py", tmp_path / "told"
    program.write_text(PROGRAM)
    run = make_run("training.early_stopping.metric=hook")
    words = ["train", str(tmp_path / "run.yaml"), "training.early_stopping.metric=hook"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--validation-hook", command(program, log)])
    assert not ended.value.code
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each[3] for each in told] == ["2", "4", "6", "8"]
    for lines, source, reference, update in told[-1:]:
        assert lines == run.folder.hypotheses(int(update)).read_text().splitlines()
        assert Path(source).read_text() == (run.text / "valid.src").read_text()
        assert Path(reference).read_text() == (run.text / "valid.trg").read_text()
    assert [row["hook"] for row in metrics(run.folder)] == [-2.0, 0.0, -2.0, -4.0]
    assert "best checkpoint 4" in run.folder.log.read_text()


def test_a_hook_is_needed_and_needs_translations(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("training.early_stopping.metric=hook")
    with pytest.raises(InputError, match="metric hook needs a validation hook; give econmt train"):
        run_recipe(run.recipe, [run.text], console=run.console)
    none = make_run("training.decode_and_evaluate=0", name="none")
    with pytest.raises(InputError, match="this recipe makes none at checkpoints"):
        run_recipe(none.recipe, [none.text], console=none.console, hook=lambda *_: 0.0)
    with pytest.raises(InputError, match="no-such-program -x: no such program"):
        program_hook("no-such-program -x")
    with pytest.raises(InputError, match="No closing quotation"):
        program_hook("cat 'x")


def test_a_hook_that_fails_leaves_a_gap(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run("training.early_stopping.metric=hook", "training.max_updates=6")

    def hook(told: Judged, _: object) -> float:
        if told.update == 4:
            raise HookError("judge: ended with exit code 3")
        return float(told.update)

    run_recipe(run.recipe, [run.text], console=run.console, hook=hook)
    found = [row["hook"] for row in metrics(run.folder)]
    assert found[::2] == [2.0, 6.0]
    assert math.isnan(found[1])
    assert "best checkpoint 6" in run.said()
    said = "warning: validation hook: judge: ended with exit code 3; this checkpoint has no figure"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('BLEU 3.5e1')", 35.0),
        ("print('5\\n\\n')", 5.0),
        ("print('none')", "ends with 'none'; the last word must be a number"),
        ("print('nan')", "ends with 'nan'"),
        ("pass", "ends with ''"),
        ("raise SystemExit(4)", "ended with exit code 4"),
        ("import os; print(5, flush=True); os.kill(os.getpid(), 9)", "ended with exit code -9"),
        ("while True: print(1)", "wrote more than 8,032 bytes for 2"),
        ("import sys; sys.stdout.buffer.write(b'7\\n\\xff')", "ends with '\ufffd'"),
    ],
)
def test_the_figure_of_a_program(
    tmp_path: Path, code: str, expected: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINE_BYTES", 8000)
    hook, translations = program_hook(command("-c", code)), judged(tmp_path, "a")
    if isinstance(expected, float):
        assert hook(translations, lambda: False) == expected
        return
    with pytest.raises(HookError, match=expected):
        hook(translations, lambda: False)


def test_a_program_that_waits_is_ended_with_the_run(tmp_path: Path) -> None:
    hook = program_hook(command("-c", "import threading; threading.Event().wait()"))
    with pytest.raises(InterruptedError):
        hook(judged(tmp_path), lambda: True)


GUIDED = ("data.alignment=align", "training.guided_alignment_weight=0.5", "training.max_updates=6")
FACTORS = ("data.source_factors=[case]", "model.source_factors_num_embed=[2]")
TERMS = (
    "data.annotate_terms={glossary: terms, share: 0.9}",
    "data.subwords={type: bpe, size: 40, joint: true}",
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    write_text(tmp_path, {"train": 30, "valid": 6})
    write_guides(tmp_path)
    return tmp_path


def run(text: Path, name: str, *overrides: str) -> Run:
    return Run(text, text / name, (*overrides, f"data.prepared={text}/prepared-{name}"))


@pytest.mark.slow
def test_attention_follows_the_alignment(text: Path) -> None:
    losses = []
    for name, weight in (("little", "0.001"), ("much", "2.0")):
        each = run(text, name, *GUIDED, f"training.guided_alignment_weight={weight}", "training.max_updates=40",
                   "training.checkpoint_interval=20", "training.decode_and_evaluate=0")  # fmt: skip
        each.train()
        losses.append([row["valid_alignment_loss"] for row in metrics(each.folder)])
        assert "alignment loss" in each.said()
    assert losses[1][-1] < 0.8 * losses[0][-1]
    assert losses[1][-1] < losses[1][0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("file", "line", "overrides"),
    [
        ("train.weights", "0.25", ("data.weights=weights",)),
        ("train.align", "0-0", ("data.alignment=align",)),
        ("valid.align", "0-0", ("data.alignment=align",)),
        ("train.case", "y", FACTORS),
        ("valid.case", "y", FACTORS),
        ("terms", "a = B", TERMS),
    ],
)
def test_a_changed_file_beside_the_text_stops_a_resumed_run(
    text: Path, file: str, line: str, overrides: tuple[str, ...]
) -> None:
    for split in ("train", "valid"):
        rows = [" ".join("x" * len(row.split())) for row in (text / f"{split}.src").read_text().splitlines()]
        rows[-1] = rows[-1].replace("x", "y")
        (text / f"{split}.case").write_text("\n".join(rows) + "\n")
    (text / "terms").write_text("c = C\n")
    both = (*overrides, "training.decode_and_evaluate=0", "training.checkpoint_interval=1")
    run(text, "run", *both, "training.max_updates=1").train()
    before = (text / file).read_text()
    # As many factors as words, but one weight, link or term a line.
    words = [len(row.split()) if "case" in file else 1 for row in before.splitlines()]
    (text / file).write_text("".join(" ".join([line] * count) + "\n" for count in words))
    longer = run(text, "run", *both, "training.max_updates=2")
    with pytest.raises(InputError, match=r"began with (other text|another vocabulary)"):
        longer.train()
    (text / file).write_text(before)
    assert longer.train().update == 2
