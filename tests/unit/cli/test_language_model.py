"""A language model through the command line: train, go on, score, generate, look at it; and what refuses it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import econmt
from econmt.cli import computing
from econmt.config.recipe import load_recipe
from econmt.data.text.vocabulary import EOS
from econmt.decoding.text_reader import TextReader
from econmt.errors import InputError
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.training.tiny_text import TextRun, write_lines


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    folder = write_lines(tmp_path_factory.mktemp("trained"), {"train": 60, "valid": 12, "test": 8})
    return TextRun(folder, folder / "run")


def test_train_score_and_generate(call: Call, trained: TextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    first = call("train", trained.path).succeeded()
    assert "test perplexity" in first.out
    assert max(map(len, first.lines)) <= 120
    results = json.loads((trained.folder.path / "results.json").read_text())
    assert results["bleu"] is None  # and no NaN, which is no JSON
    assert call("train", trained.path).out.count("nothing to do") == 1
    model = trained.folder.path

    monkeypatch.setattr("econmt.cli.score.CHUNK_SIZE", 3)
    total = call("score --score-type perplexity --total -m", model, "-t", trained.text / "test.txt")
    assert float(total.out) == pytest.approx(results["perplexities"]["test"], rel=1e-5)
    assert "8 lines" in total.err
    counts: list[int] = []
    shown: list[bool] = []

    @contextmanager
    def counting(*_: object, show: bool) -> Iterator[Callable[[int], None]]:
        shown.append(show)
        yield counts.append

    with monkeypatch.context() as patch:
        patch.setattr(computing, "counting", counting)
        call("score", "-m", model, "-t", trained.text / "test.txt", "--total")
    assert (counts, shown) == ([1] * 8, [True])
    text = (trained.text / "test.txt").read_text()
    lines = call("score", "-m", model, text=text).lines
    assert len(lines) == 8
    parts = [json.loads(line) for line in call("score", "-m", model, "--score-type", "json", text=text).lines]
    assert [part["log_probability"] for part in parts] == pytest.approx(list(map(float, lines)), abs=1e-5)
    nats = -math.fsum(map(float, lines)) / sum(part["words"] for part in parts)
    assert math.exp(nats) == pytest.approx(float(total.out), rel=1e-4)
    words = sum(part["words"] for part in parts)
    sums = {"logprob": -nats * words, "neglogprob": nats * words}
    counts = {"lines": 8, "words": words, "tokens": words}
    figures = {**counts, "nats": nats * words, "perplexity": math.exp(nats)}
    for kind, wanted in (*sums.items(), ("json", figures)):
        found = json.loads(call(f"score --total --score-type {kind} -m", model, text=text).out)
        assert found == pytest.approx(wanted, rel=1e-4)
    first = min(trained.folder.numbered_parameters())
    assert call("score -m", model, "--checkpoint", first, text=text).lines != lines

    options = ("-m", model, "--prompt", "a b", "--length", "30", "--seed", "4")
    written = call("generate", *options).succeeded()
    assert written.out.startswith("a b")
    assert call("generate", *options).out == written.out
    assert call("generate", *options[:-1], "5").out != written.out
    counted = len(written.out.split()) + written.out.count("\n") - 2
    assert counted in (30, 31), "the last line may not have ended"
    greedy = [call("generate", "-m", model, "--top-k", "1", "--seed", seed).out for seed in (1, 2)]
    assert greedy[0] == greedy[1]

    assert "2 x LSTM 8" in call("info", model).out
    for arguments, wanted in (
        (("translate -m", model), "holds a language model, which does not translate"),
        (("quantize -m", model, "-o", model / "x"), "holds a language model"),
        (("score -s x -t y -m", model), "--source is for translation models"),
        (("score -m", model, "-m", model), "language models cannot form an ensemble"),
        (("profile --bucket 3x4 --estimate", trained.path), "a language model has no buckets"),
    ):
        ended = call(*arguments, text="a\n")
        refused(ended, wanted)
        assert ended.out == ""

    call("average", "-m", model, "-n", "1", "-o", model.with_name("averaged")).succeeded()
    assert call("score", "-m", model.with_name("averaged"), text=text).code == 0
    call("export", model, model.with_name("exported")).succeeded()
    assert call("score", "-m", model.with_name("exported"), text=text).lines == lines


def test_prepare_profile_and_dry_run(call: Call, trained: TextRun, tmp_path: Path) -> None:
    prepared = call("prepare", trained.path).succeeded()
    words = len((trained.text / "train.txt").read_text().split()) + 60
    assert f"{words:,}" in prepared.out
    assert "3 rows of 5 tokens" in call("train", trained.path, "--dry-run").succeeded().out
    timed = call("bench", "training", trained.path, "--length", "5", "--seconds", "0.01", "--threads", "1")
    assert timed.code == 0, timed.err
    assert "target tokens/s" in timed.out.partition("\n")[0].split(",")
    for options in ("--estimate --device cuda --html page.html", "--html page.html", "--fit 1GiB"):
        profiled = call(
            f"profile {options}".replace("page", str(tmp_path / "page")), trained.path
        ).succeeded()
        assert "3 rows of 5 tokens" in profiled.out or "--fit" in options
        assert max(len(line) for line in profiled.lines if str(tmp_path) not in line) <= 80


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("training.batch.type=word", "training.batch.type has no effect with task: language_model"),
        ("decoding.beam_size=3", "decoding.beam_size has no effect with task: language_model"),
        ("ops.decoder=reference", "ops.decoder has no effect with task: language_model"),
        ("data={source: a, target: b, train: [x], valid: y}", "task: language_model needs data.text"),
        ("model={encoder: {}}", "needs model.size and model.layers"),
        ("task=translation", "task: translation needs data.source"),
        (
            "training={max_updates: 3, averaging: {start: at-once}, schedule: {name: plateau-reduce}}",
            "plateau-reduce cannot be combined with training.averaging.start",
        ),
    ],
)
def test_what_does_not_fit_the_task_is_refused(trained: TextRun, override: str, wanted: str) -> None:
    with pytest.raises(InputError, match=re.escape(wanted)):
        load_recipe(trained.path, [override])
    with pytest.raises(InputError, match=r"training\.bptt has no effect with task: translation"):
        load_recipe("quickstart", ["training.bptt=20"])


def test_from_python(call: Call, trained: TextRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TextRun(trained.text, tmp_path / "run")
    assert call("train", run.path).code == 0
    folder = run.folder.path
    model = econmt.load(folder, device="cpu", precision="float32")
    assert re.fullmatch(
        r"<TrainedLanguageModel .*: \d x \w+ \d+, [\d,]+ parameters, vocabulary of .*>", repr(model)
    )
    lines = (trained.text / "train.txt").read_text().splitlines()[:5]
    scored = call("score --precision float32 -m", folder, text="".join(f"{line}\n" for line in lines))
    assert [f"{each.log_probability:.6f}" for each in model.score(lines)] == scored.lines
    options = ("--length", 20, "--top-k", 5, "--seed", 3, "--precision", "float32")
    written = call("generate", "-m", folder, *options)
    text = model.generate(length=20, top_k=5, seed=3)
    assert text == written.out.removesuffix("\n")
    assert text == model.generate(length=20, top_k=5, seed=3)
    word = model.vocabularies.target.encode("a")
    with monkeypatch.context() as patched:
        patched.setattr(TextReader, "write", lambda *_, **__: [EOS, EOS, *word, EOS, EOS])
        assert model.generate("a") == "a\n\na\n"  # blank lines are lines, and the last end ends the text
    wrong_values: list[tuple[Callable[..., Any], Any, str]] = [
        (model.translate, ["a"], "is a language model, which does not translate"),
        (model.search_options, {}, "is a language model, which does not translate"),
        (model.score, ["a", "\ud800"], r"lines\[1\]: text: the character U\+D800"),
        (model.generate, 5, "generate expects a text"),
        (model.generate, "\ud800", r"prompt: text: the character U\+D800"),
    ]
    for function, argument, message in wrong_values:
        with pytest.raises(InputError, match=message):
            function(argument)
    for wrong in ({"length": 0}, {"top_k": -1}, {"top_p": 0.0}, {"temperature": 0.0}, {"seed": 1.5}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            model.generate(**wrong)
