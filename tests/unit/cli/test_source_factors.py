"""A task that source factors alone make learnable, from its files to translations, scores and refusals."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

import econmt
from econmt.data.text.subwords import load_vocabularies
from econmt.errors import InputError
from econmt.evaluation.scoring import Scorer
from econmt.model import TranslationModel
from econmt_serve.models import Served
from econmt_serve.settings import Settings
from tests.unit.cli.conftest import Call
from tests.unit.training.tiny import Run, assert_parts_are_the_whole

TASK = (
    "data.source_factors=[case]",
    "data.subwords={type: words, source: 50, target: 50}",
    "model.embedding=8",
    "model.encoder.size=16",
    "model.decoder.size=16",
    "model.attention={type: dot}",
    "model.dropout=0",
    "training.batch.size=16",
)
CONCAT = ("model.source_factors_num_embed=[4]",)
SUM = ("model.source_factors_num_embed=[8]", "model.source_factors_combine=sum")


@pytest.fixture(scope="module")
def factored_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Letters, of which the factor alone says whether their translation is a capital or has a 2 behind it."""
    folder, draw = tmp_path_factory.mktemp("factors"), random.Random(3)
    for name, count in (("train", 200), ("valid", 20)):
        sizes = (draw.randint(1, 3) for _ in range(count))
        rows = [[(draw.choice("abcdef"), draw.choice("ud")) for _ in range(size)] for size in sizes]
        columns = {
            "src": [" ".join(letter for letter, _ in row) for row in rows],
            "case": [" ".join(factor for _, factor in row) for row in rows],
            "trg": [" ".join(a.upper() if b == "u" else f"{a}2" for a, b in row) for row in rows],
        }
        for suffix, lines in columns.items():
            (folder / f"{name}.{suffix}").write_text("".join(line + "\n" for line in lines))
    return folder


@pytest.fixture(autouse=True)
def _few_pairs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt.cli.score.CHUNK_SIZE", 3)


@pytest.fixture(scope="module")
def model(factored_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = ("training.max_updates=100", "training.checkpoint_interval=100", "training.decode_and_evaluate=0")
    run = Run(factored_text, tmp_path_factory.mktemp("factored") / "run", (*TASK, *CONCAT, *more)).trained()
    return run.folder.path


@pytest.fixture
def files(factored_text: Path) -> list[object]:
    """Options that name the validation text and its factors."""
    return ["-i", factored_text / "valid.src", "--input-factors", factored_text / "valid.case"]


def test_a_translation_has_the_score_that_scoring_gives(
    call: Call, model: Path, factored_text: Path, files: list[object], tmp_path: Path
) -> None:
    shown = call("translate", "-m", model, *files, "--output-type", "json", "--precision", "float32")
    answers = [json.loads(line) for line in shown.lines]
    (tmp_path / "out").write_text("".join(" ".join(answer["tokens"]) + "\n" for answer in answers))
    given = ["-s", factored_text / "valid.src", "-t", tmp_path / "out", "--target-tokens"]
    factors = ["--source-factors", factored_text / "valid.case", "--precision", "float32"]
    scored = [float(line) for line in call("score", "-m", model, *given, *factors).lines]
    assert scored == pytest.approx([answer["log_probability"] for answer in answers], abs=1e-4)
    columns = ((factored_text / f"valid.{name}").read_text().splitlines() for name in ("src", "case"))
    rows = zip(*columns, strict=True)
    lines = "".join(json.dumps({"text": text, "factors": [case]}) + "\n" for text, case in rows)
    inside = call("translate", "-m", model, "--json-input", "--precision", "float32", text=lines)
    assert inside.lines == [answer["translation"] for answer in answers]


def test_requests_from_python_have_factors(model: Path) -> None:
    loaded = econmt.load(model, device="cpu", precision="float32")
    upper, down = loaded.translate([econmt.Request("a", factors=["u"]), econmt.Request("a", factors=["d"])])
    assert (upper.text, down.text) == ("A", "a2")
    assert upper.source_tokens == down.source_tokens == ["a"]
    word, wordless = econmt.Request("a", factors=["d"]), econmt.Request("3 - 4")
    number, again = loaded.translate([wordless._replace(factors=["u u d"]), word])
    assert (number.text, number.tokens, again.text) == ("3 - 4", ["3", "-", "4"], "a2"), "it has no word"
    two, none = "2 source factors for 3 words of input:2", "0 streams of source"
    for factors, problem in ((["u u"], two), ([], none)):
        with pytest.raises(InputError, match=problem):
            loaded.translate([word, wordless._replace(factors=factors)])
    scorer = Scorer(loaded.models, loaded.vocabularies)
    (scored,) = loaded.score([econmt.Request("a", factors=["u"])], [upper.text])
    assert scored.log_probability == pytest.approx(upper.log_probability, abs=1e-4)
    with pytest.raises(InputError, match="pair 1: 0 streams of source factors, but the model has 1"):
        scorer.score_ids(["a"], [[5]])
    with pytest.raises(InputError, match="markup is not supported by models with source factors"):
        loaded.translate(["a"], markup=True, attention=True)
    with pytest.raises(InputError, match="restore_case is not supported"):
        loaded.translate(["A"], restore_case=True)


def test_factors_that_do_not_fit(
    call: Call, model: Path, word_model: Path, factored_text: Path, files: list[object], tmp_path: Path
) -> None:
    source = factored_text / "valid.src"
    lines = (factored_text / "valid.case").read_text().splitlines()
    words = source.read_text().splitlines()[3].split()
    files_of = {
        "wrong": [*lines[:3], "u " * 5, *lines[4:]],
        "short": lines[:4],
        "long": [*lines, "u"],
        "unknown": [re.sub(r"[^ ]+", "other", line) for line in lines],
    }
    for name, content in files_of.items():
        (tmp_path / name).write_text("\n".join(content) + "\n")
    wrong, short, long, unknown = (tmp_path / name for name in files_of)
    translate = ("translate --chunk-size 3 -m", model, "-i", source, "--input-factors")
    score = ("score -m", model, "-s", source, "-t", factored_text / "valid.trg", "--source-factors")
    plural = "s" if len(words) != 1 else ""
    count = f"5 source factors for {len(words)} word{plural} of {source}:4; give one for each"
    given = json.dumps({"text": "a b", "factors": ["u"]})
    other = "the model expects no source factors, and the number of files given is 1; leave"
    json_input = ("translate --json-input -m", model)
    none = "expects source factors (case), and the number of files given is 0; give --inp"
    few = "standard input:1: factors[0]: 1 source factor for 2 words of standard input:1"
    cases: list[tuple[tuple[object, ...], str, str]] = [
        (("translate -m", model), "", none),
        (score[:-1], "", "give --source-factors FILE"),
        (("translate -m", word_model, *files), "", other),
        (json_input, given, few),
        (json_input, '{"text": "a"}', "0 streams of source factors, but the model has 1"),
        (("translate --json-input -m", word_model), given, "the model has none"),
        ((*json_input, *files[2:]), given, "have their own"),
    ]
    for command in (translate, score):
        cases += [
            ((*command, wrong), "", f"{wrong}:4: {count}"),
            ((*command, short), "", f"{short} has 4 lines, and {source} has more"),
            ((*command, long), "", f"{long} has more than the 20 lines of {source}"),
        ]
        doubt = f"warning: {unknown}:1: the model's stream 1 of source factors knows none of its tokens"
        assert doubt in call(*command, unknown).err
    for command, text, message in cases:
        ended = call(*command, text=text)
        assert ended.code != 0
        assert message in ended.err.splitlines()[-1]


def test_what_else_a_model_with_factors_can(call: Call, model: Path, tmp_path: Path) -> None:
    assert "factors      concat: 6 of width 4" in call("info", model).lines
    ended = call("export --runtime", model, tmp_path / "runtime")
    assert "the runtime does not support data.source_factors" in ended.err
    with pytest.raises(InputError, match="reads source factors, which no request to a server has"):
        Served([model], Settings())
    lean, small = tmp_path / "lean", tmp_path / "small"
    for folder, command in ((lean, ("export", model, lean)), (small, ("quantize -m", model, "-o", small))):
        assert call(*command).code == 0
        assert (folder / "vocab.factor1.txt").is_file()
        line = '{"text": "a c", "factors": ["u d"]}'
        assert call("translate", "-m", folder, "--json-input", text=line).lines == ["A c2"]
    (lean / "vocab.factor1.txt").unlink()
    assert "vocabulary" in call("translate -m", lean, text="a").err


@pytest.mark.parametrize(
    "combine", [CONCAT, pytest.param(SUM, marks=pytest.mark.thorough)], ids=["concat", "sum"]
)
def test_a_run_goes_on_after_a_stop(factored_text: Path, tmp_path: Path, combine: tuple[str, ...]) -> None:
    text = Path(shutil.copytree(factored_text, tmp_path / "text"))

    def make_run(*more: str, name: str) -> Run:
        return Run(text, tmp_path / name, (*TASK, *combine, "model.dropout=0.2", *more))

    assert_parts_are_the_whole(make_run, ends=(2, 4))
    (text / "train.case").write_text((text / "train.case").read_text().replace("u", "x", 1))
    with pytest.raises(InputError, match=r"vocab\.factor1\.txt: the run began with another vocabulary"):
        make_run("training.max_updates=6", name="parts").train()


def test_tuning_with_other_factors_takes_over_the_rows_of_those_that_stay(
    factored_text: Path, model: Path, tmp_path: Path
) -> None:
    text = Path(shutil.copytree(factored_text, tmp_path / "text"))
    (text / "train.case").write_text((text / "train.case").read_text().replace("u", "a b c u", 1))
    (text / "train.src").write_text("a b c " + (text / "train.src").read_text())
    more = (f"training.initialize_from={model}", "training.update_vocab=true")
    trainer = Run(text, tmp_path / "run", (*TASK, *CONCAT, *more)).trainer()
    assert isinstance(trainer.model, TranslationModel)
    before = econmt.load(model, device="cpu").models[0].source_factor_embeddings[0].weight
    after = trainer.model.source_factor_embeddings[0].weight
    folders = (model, len(before)), (text / "prepared", len(after))
    theirs, ours = ([*load_vocabularies(each).factors[0].tokens(range(size))] for each, size in folders)
    assert len(after) == len(before) + 3
    for token in ("u", "d"):
        assert torch.equal(after[ours.index(token)], before[theirs.index(token)])
