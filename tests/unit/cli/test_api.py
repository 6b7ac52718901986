"""The Python interface: what the command line gives, without it."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import econmt
from econmt.api import translation as translation_module
from econmt.checkpoint.folder import ModelFolder
from econmt.config.model import Model
from econmt.config.recipe import load_recipe, read_recipe
from econmt.data.text.glossary import Glossary
from econmt.data.user_programs import program_words
from econmt.decoding.search.fusion import ShallowFusion
from econmt.errors import InputError
from econmt.export.lexicon import make_lexicon
from econmt.export.model_folder import quantize_model
from econmt.export.runtime import export_runtime
from tests.conftest import run_python
from tests.unit.cli.conftest import Call
from tests.unit.training.tiny import snapshot, write_recipe

LINES = ["a b c", "", "d", "h g f e d"]


@pytest.fixture(scope="module")
def model(word_model: Path) -> econmt.TrainedModel:
    return econmt.load(word_model, device="cpu")


@pytest.mark.slow
def test_importing_econmt_imports_no_torch() -> None:
    code = "import sys, econmt; print('torch' in sys.modules, callable(econmt.load), 'torch' in sys.modules)"
    assert run_python("-c", code).stdout.split() == ["False", "True", "True"]
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        econmt.lod  # type: ignore[attr-defined]  # noqa: B018


def test_translations_are_those_of_the_command_line(
    call: Call, model: econmt.TrainedModel, word_model: Path
) -> None:
    found = model.translate(LINES, beam_size=4, nbest_size=3)
    options = ("-b", 4, "--nbest-size", 3, "--output-type", "attention")
    ended = call("translate", "-m", word_model, *options, text="".join(line + "\n" for line in LINES))
    for source, translation, line in zip(LINES, found, ended.lines, strict=True):
        expected = json.loads(line)
        assert (translation.text, translation.score) == (expected["translation"], expected["score"])
        hypotheses = [(each["translation"], each["score"]) for each in expected["nbest"]]
        assert [(each.text, each.score) for each in translation.hypotheses] == hypotheses
        if not source:
            assert (translation.attention, expected["attention"]) == (None, [])
            continue
        assert translation.attention.shape == (len(translation.tokens) + 1, len(source.split()) + 1)
        sums = translation.attention.sum(dim=1).tolist()
        assert sums == pytest.approx([1.0] * (len(translation.tokens) + 1), abs=1e-5)
        for row, theirs in zip(expected["attention"], translation.attention.tolist(), strict=True):
            assert row == pytest.approx(theirs, abs=1e-4)
    assert [len(translation.hypotheses) for translation in found] == [3, 0, 3, 3]
    assert model.translate([]) == []
    assert all(each.attention is None for each in model.translate(LINES, attention=False))


def test_who_asks_the_same_again_gets_the_translator_with_its_graphs(word_model: Path) -> None:
    model = econmt.load(word_model, device="cpu")
    first = model.translator({"beam_size": 2})
    assert model.translator({"beam_size": 2}) is first
    assert model.translator({"beam_size": 2}, batch_size=model.recipe.decoding.batch_size) is first
    assert model.translator({"beam_size": 3}) is not first
    again = model.translator({"beam_size": 2})
    model.to("cpu")
    assert model.translator({"beam_size": 2}) is not again


def test_every_other_option_makes_another_translator(
    word_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = econmt.load(word_model, device="cpu")
    monkeypatch.setattr(model, "_shortlists", lambda path, top: None)
    fusion = ShallowFusion(None, 0.2, torch.float32)  # type: ignore[arg-type]
    monkeypatch.setattr(model, "_fusion", lambda folder, weight: fusion if folder else None)
    others: dict[str, Any] = {
        "batch_size": 1,
        "chunk_size": 7,
        "max_input_length": 9,
        "long_lines": "skip",
        "avoid": ["ba"],
        "glossary": Glossary({"ba": "G"}),
        "restrict_lexicon": "lexicon",
        "restrict_lexicon_topk": 3,
        "language_model": "runs/german",
    }
    lexicon = {"restrict_lexicon": "lexicon"}
    further = {"batch_size", "chunk_size", "max_input_length", "long_lines"}
    named = set(inspect.signature(model.translator).parameters)
    assert named == {"search", "warn", "further", *others} - further
    for name, value in others.items():
        beside = lexicon if name == "restrict_lexicon_topk" else {}
        usual = model.translator({}, **beside)
        changed = model.translator({}, **beside, **{name: value})
        assert changed is not usual, name
        assert model.translator({}, **beside, **{name: value}) is changed


CALLS: list[dict[str, Any]] = [
    {"nbest_size": 2},
    {"beam_size": 1, "attention": False},
    {"avoid": ["D", "C B"]},
    {"glossary": Glossary({"a": "H"}), "length_penalty_alpha": 0.2},
    {"sample": 0, "seed": 3, "nbest_size": 2},
    {"sample": 2, "temperature": 0.5},
    {"ban_unk": True, "min_output_length": 4, "max_input_length": 2},
    {"markup": True, "restore_case": True},
    {"split_sentences": True, "batch_size": 1},
    {"block_ngram_repeat": 1, "replace_unk": True},
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_call_leaves_nothing_to_the_next(word_model: Path, number: int) -> None:
    """Each call, before and after another one, gives what it gives with a model of its own."""

    def found(model: Any, call: dict[str, Any]) -> list[list[tuple[Any, ...]]]:
        with warnings.catch_warnings(record=True):
            made = model.translate([*LINES, "A B. <b>C</b> h {x}", "HALT AB"], **call)
        return [[(each.text, each.score, each.tokens) for each in line.hypotheses] for line in made]

    def load() -> Any:
        return econmt.load(word_model, device="cpu", precision="float32")

    model, other = load(), CALLS[(number + 3) % len(CALLS)]
    expected = [found(load(), call) for call in (CALLS[number], other, {})]
    assert [found(model, call) for call in (CALLS[number], other, {})] == expected
    assert [found(model, call) for call in (CALLS[number], {}, other)] == [expected[at] for at in (0, 2, 1)]


@pytest.mark.parametrize(
    ("inside", "beside", "avoided"), [(("A",), (), ("A",)), (("A",), ("B",), ("B",)), ((), ("B",), ("B",))]
)
def test_phrases_are_avoided_wherever_they_are_given(
    word_model: Path, inside: tuple[str, ...], beside: tuple[str, ...], avoided: tuple[str, ...]
) -> None:
    made = econmt.load(word_model, device="cpu").translator({"avoid": inside}, avoid=beside)
    assert made.options.avoid == avoided


@pytest.mark.parametrize(
    ("given", "expected"), [(6, [6, 6]), ([6], [6, 6]), ([8, 6], [8, 6]), (["last", 6], ["last", 6])]
)
def test_each_model_of_an_ensemble_has_its_checkpoint(
    word_model: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, given: Any, expected: list[object]
) -> None:
    real, loaded = translation_module.load_model, list[tuple[Path, object]]()

    def load_model(folder: Path, which: Any, device: torch.device) -> Any:
        loaded.append((folder, which))
        return real(folder, which, device)

    monkeypatch.setattr(translation_module, "load_model", load_model)
    econmt.load([word_model, copy], given, precision="float32", device="cpu")
    assert loaded == [(word_model, expected[0]), (copy, expected[1])]


def test_the_widest_model_of_an_ensemble_decides_on_threads(
    word_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[object, int]] = []
    widths = iter([64, 512, 8])
    monkeypatch.setattr(Model, "widest", property(lambda _: next(widths)))

    def threads_for(given: int | None, _: torch.device, width: int) -> SimpleNamespace:
        found.append((given, width))
        return SimpleNamespace(number=1)

    monkeypatch.setattr(translation_module, "threads_for", threads_for)
    monkeypatch.setattr(
        translation_module.torch, "set_num_threads", lambda number: found.append(("set", number))
    )
    econmt.load([word_model] * 3, checkpoint=["best", "last", 6], threads="auto", precision="float32")
    assert found == [(None, 512), ("set", 1)]


def test_a_line_longer_than_any_in_training_warns(model: econmt.TrainedModel) -> None:
    with pytest.warns(UserWarning, match="input:2: 120 source tokens"):
        model.translate(["a", "b " * 120])


def test_a_translator_that_another_thread_replaces_meanwhile_does_no_harm(model: econmt.TrainedModel) -> None:
    class Meanwhile(Glossary):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, _: object) -> bool:
            model._translator = None
            return True

    for _ in range(2):
        assert model.translator({"beam_size": 3}, glossary=Meanwhile({"a": "B"})).options.beam_size == 3


def test_what_cannot_be_used_is_one_clear_line(model: econmt.TrainedModel, word_model: Path) -> None:
    translate, score, load = model.translate, model.score, partial(econmt.load, device="cpu")
    broken = "text: the character U\\+D800"
    cases: list[tuple[str, Callable[[], object]]] = [
        ("list of lines", lambda: translate("A dog.")),
        ("list of lines", lambda: translate([b"A dog."])),
        (rf"targets\[0\]: {broken}", lambda: score(["a"], ["a\ud800"])),
        ("glossary expects a file", lambda: translate(LINES, glossary={"a": "B"})),
        ("language_model expects the folder", lambda: translate(LINES, language_model=model)),
        ("beem_size", lambda: translate(LINES, beem_size=2)),
        ("cuda:99", lambda: translate(LINES, device="cuda:99")),
        ("precision 'int4'", lambda: load(word_model, precision="int4")),
        ("at least one", lambda: load([])),
    ]
    for line in ("a\ud800", econmt.Request("a\ud800")):
        cases.append((f"input:2: {broken}", lambda line=line: translate(["a", line])))
        cases.append((rf"sources\[0\]: {broken}", lambda line=line: score([line], ["a"])))
    for message, use in cases:
        with pytest.raises(InputError, match=message):
            use()


def test_training_is_the_command_lines(
    call: Call, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", text, tmp_path / "none")
    fewer = ("training.max_updates=4", "model.dropout={layers: 0.1}")
    assert "validation BLEU" in call("train", recipe, *fewer, f"output={tmp_path / 'cli'}").succeeded().out
    changes = {"training.max_updates": 4, "model.dropout": {"layers": 0.1}, "output": tmp_path / "api"}
    capsys.readouterr()
    outcome = econmt.train(recipe, changes, data_dir=text, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert outcome.training.update == 4
    assert outcome.results.best_update in (2, 4)
    folders = ModelFolder(tmp_path / "cli"), ModelFolder(tmp_path / "api")
    assert snapshot(folders[0]) == snapshot(folders[1])
    assert econmt.train(str(recipe), [*fewer, f"output={tmp_path / 'api'}"]).results is None
    loaded = load_recipe(recipe, [*fewer, f"output={tmp_path / 'loaded'}"])
    econmt.train(loaded, search=[text], quiet=True)
    assert snapshot(ModelFolder(tmp_path / "loaded")) == snapshot(folders[0])
    with pytest.raises(InputError, match="give them to load_recipe"):
        econmt.train(loaded, fewer)
    other = "did you mean training.seed"
    for wrong, message in (("training.seed=2", "list of key=value"), (["training.sed=2"], other)):
        with pytest.raises(InputError, match=message):
            econmt.train(recipe, wrong)


def test_the_interface_has_these_names() -> None:
    assert dir(econmt) == ["Request", "TrainedModel", "__version__", "evaluate", "load", "memory", "train"]


def test_a_model_says_what_it_is(word_model: Path, model: econmt.TrainedModel) -> None:
    count = sum(parameter.numel() for parameter in model.models[0].parameters())
    text = repr(econmt.load([word_model, word_model], device="cpu", precision="float32"))
    assert text.startswith("<TrainedModel reverse, reverse: src to trg, 1 x lstm 8 and 1 x lstm 8, ")
    assert f"{2 * count:,} parameters, vocabularies of 12 and 12, float32 on cpu>" in text


def test_scores_are_those_of_the_command(call: Call, model: econmt.TrainedModel, word_model: Path) -> None:
    pairs = [("a b c", "C B A"), ("d", "D"), ("h g", "G")]
    found = model.score(*zip(*pairs, strict=True), batch_size=2)
    ended = call("score", "-m", word_model, text="".join(f"{a}\t{b}\n" for a, b in pairs))
    assert [f"{each.log_probability:.6f}" for each in found] == ended.lines
    with pytest.raises(InputError, match="2 sources and 1 targets"):
        model.score(["a", "b"], ["A"])
    with pytest.raises(InputError, match="score expects two lists"):
        model.score("a", "A")
    with pytest.raises(InputError, match="generate is for language models"):
        model.generate("a")


def test_drawing_has_the_names_of_the_command_line(model: econmt.TrainedModel) -> None:
    assert model.search_options({"sample": True}).sample == 0
    assert model.search_options({"sample": False}).sample is None


def test_options_that_would_change_nothing_are_refused(model: econmt.TrainedModel) -> None:
    drawn, length_ratio = {"sample": True}, {"brevity_penalty_constant_length_ratio": 2.0}
    for options, name, needed in (
        ({"temperature": 0.5}, "temperature", "sample"),
        ({"top_p": 0.9}, "top_p", "sample"),
        ({"top_k": 3}, "top_k", "sample=True"),
        ({"sample": 0, "top_k": 3}, "top_k", "sample=True"),
        ({"sample": 5, "top_k": 3}, "top_k", "sample=True"),
        ({**drawn, "beam_prune": 0.5}, "beam_prune", "beam search"),
        ({**drawn, "brevity_penalty_weight": 0.5}, "brevity_penalty_weight", "beam search"),
        ({**drawn, "beam_search_stop": "first"}, "beam_search_stop", "beam search"),
        (length_ratio, "brevity_penalty_constant_length_ratio", "brevity_penalty_weight above 0"),
        ({"restrict_lexicon_topk": 3}, "restrict_lexicon_topk", "restrict_lexicon"),
    ):
        with pytest.raises(InputError, match=f"{name} has no effect without {needed}"):
            model.translate(["a"], **options)


def test_evaluation_is_that_of_the_command_line(call: Call, tmp_path: Path) -> None:
    hypotheses, references = ["A B C D E", "F G H"], ["A B C D F", "F G H"]
    (tmp_path / "h").write_text("\n".join(hypotheses) + "\n")
    (tmp_path / "r").write_text("\n".join(references) + "\n")
    scores = econmt.evaluate(hypotheses, references)
    out = call("evaluate", "-r", tmp_path / "r", "-i", tmp_path / "h").out
    assert list(scores) == ["bleu", "chrf", "ter"]
    assert all(f"{score.value:.2f}" in out for score in scores.values())
    with pytest.raises(InputError, match="2 hypotheses and 1 references"):
        econmt.evaluate(hypotheses, ["a"])
    with pytest.raises(InputError, match="metric 'meteor'"):
        econmt.evaluate(hypotheses, references, ["meteor"])


def test_arguments_of_another_kind_are_told(
    model: Any, word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lexicon = partial(make_lexicon, word_model, tmp_path / "lexicon", [])
    calls: list[tuple[Callable[..., object], Any, str]] = [
        (model.translator({}).translate_chunk, [1], "input:1: expected text or a Request, found int"),
        (model.translate, [econmt.Request("a", *[5])], "input:1: constraints: expected a list of phrases"),
        (model.translate, [econmt.Request("a", glossary=model)], "input:1: glossary: expected"),
        (Glossary, {"a": 5}, "a glossary expects terms with their translations"),
        (Glossary, {"a": "\u3000"}, "a glossary expects terms"),
        (lambda given: model.translate(["a"], avoid=given), Glossary({}), "avoid expects a list of phrases"),
        (model.scorer, "2", "batch_size: expected a whole number"),
        (model.to, ["cpu"], r"device '\['cpu'\]': unknown; use auto, cpu"),
        (econmt.api.check_training, model, "recipe .*: expected one that load_recipe has read"),
        (lambda given: lexicon(top_k=given), "x", r"top_k: expected a whole number from 1 to .*, found x"),
    ]
    for run, given, message in calls:
        with pytest.raises(InputError, match=message):
            run(given)
    assert read_recipe(str(word_model / "recipe.yaml")) == model.recipe
    for made in (export_runtime, quantize_model):
        made(str(word_model), str(tmp_path / made.__name__))  # type: ignore[operator]
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(InputError, match="the working directory has been removed; change to another one"):
        econmt.train("quickstart")


def test_long_terms_and_commands_are_shortened_in_messages(model: econmt.TrainedModel) -> None:
    long = "x" * 5000
    assert len(Glossary({long: long}).name_of(long)) < 100
    for command in (long, f"cat '{long}"):
        with pytest.raises(InputError) as error:
            program_words("--command", command)
        assert len(str(error.value)) < 400
    request, compiler = econmt.Request("a", target_prefix=long), model.translator({}).constraint_compiler
    with pytest.raises(InputError, match=r"x: target_prefix 'x{37}\.\.\.' has characters or words that"):
        compiler.of(request, "x")
