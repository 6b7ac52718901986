"""What is wished of translations, glossaries and language models, through the command line and from Python."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import econmt
from econmt.api.translation import load_fusion
from econmt.data.text.annotation import term_tag_ids
from econmt.data.text.glossary import Glossary
from econmt.errors import InputError
from econmt_ops.backends import c as native
from econmt_serve.models import LoadedModels, TranslationJob
from econmt_serve.settings import Settings
from tests.unit.cli.conftest import SUBWORDS, Call
from tests.unit.cli.test_refusals import refused
from tests.unit.cli.test_translate import failure
from tests.unit.training.tiny import Run
from tests.unit.training.tiny_text import TextRun

TEXT = "a b c\nd\n\nh g f e d\n"


def objects(*rows: dict[str, object] | str) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def test_lines_of_json_go_in_and_come_out(call: Call, word_model: Path) -> None:
    given = objects(
        {"text": "a b c", "id": 7},
        {"text": "d", "constraints": ["A B", "H"], "translation": "mine"},
        "",
        {"text": "h g f e d", "target_prefix": "C C", "avoid": ["A"], "glossary": {"e": "E H E", "x": "F"}},
    )
    ended = call("translate", "-m", word_model, "--json-input", "--output-type", "json", text=given)
    first, second, blank, last = (json.loads(line) for line in ended.lines)
    plain = call("translate", "-m", word_model, "--output-type", "json", text=TEXT).lines
    assert first.pop("id") == 7
    expected = json.loads(plain[0])
    assert first.keys() == expected.keys()
    assert (first["translation"], first["tokens"]) == (expected["translation"], expected["tokens"])
    # A search with wishes adds up otherwise.
    assert first["score"] == pytest.approx(expected["score"], abs=1e-4)
    assert {"A B", "H"} <= {*second["translation"].split(), *pairs(second["translation"])}
    assert blank["translation"] == ""
    assert last["translation"].startswith("C C")
    assert "A" not in last["translation"].split()
    assert "E H E" in last["translation"]
    steered = ("--json-input", "--glossary-mode", "constrain")
    texts = call("translate", "-m", word_model, *steered, text=given).lines
    assert texts == [first["translation"], second["translation"], "", last["translation"]]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_the_search_that_runs_is_told_and_changes_nothing(
    precision: str, call: Call, subword_model: Path, text: Path, tmp_path: Path
) -> None:
    """Pruning that prunes nothing goes by another search; a phrase that no translation holds does not."""
    avoided = tmp_path / "avoid.txt"
    avoided.write_text("H A H A H A H A\n")
    given = ("translate", "-m", subword_model, "-i", text / "test.src", "--precision", precision)
    given = (*given, "--beam-size", 5, "--nbest-size", 5, "--output-type", "json")
    options = (), ("--avoid-list", avoided), ("--beam-prune", 50)
    plain, steered, pruned = (call(*given, *more) for more in options)
    assert len(plain.lines) == 12
    assert steered.lines == pruned.lines == plain.lines
    in_c = native.serves(torch.empty(1))
    for ended in (plain, steered):
        assert f"; search in {'C' if in_c else 'PyTorch'}, {precision}\n" in ended.err
    assert f"; search in PyTorch{' with steps in C' if in_c else ''}, {precision}\n" in pruned.err


def pairs(text: str) -> list[str]:
    words = text.split()
    return [f"{one} {other}" for one, other in pairwise(words)]


def test_a_line_of_json_that_is_wrong_is_named_and_loses_nothing(call: Call, word_model: Path) -> None:
    good = ("translate", "-m", word_model, "--json-input")
    ended = call(*good, "--chunk-size", 1, text=objects({"text": "a"}, {"text": "b"}, '{"text": 1}'))
    failure(ended, "standard input:3: text: expected text, found 1")
    assert len(ended.lines) == 2
    failure(call(*good, text=objects({"text": "a", "constraints": ["ä"]})), "standard input:1", "'ä'")
    sampled = call(*good, "--sample", text=objects({"text": "a", "target_prefix": "A"}))
    failure(sampled, "standard input:1", "sample cannot be combined")


def test_lists_hold_for_every_line(call: Call, word_model: Path, subword_model: Path, tmp_path: Path) -> None:
    (tmp_path / "avoid").write_text("A\nC D\n")
    (tmp_path / "terms").write_text("d\tF F\nb c\tH\n")
    lists = ("--avoid-list", tmp_path / "avoid", "--glossary", tmp_path / "terms")
    for model in (word_model, subword_model):
        found = call("translate", "-m", model, *lists, text=TEXT * 3).lines
        assert found[2] == ""
        for line in found:
            assert "A" not in line.split()
            assert "C D" not in pairs(line)
        for number in (0, 1, 3):
            assert ("H" in found[number].split()) or number
            assert ("F F" in pairs(found[number])) or not number
    ensemble = call("translate", "-m", word_model, "-m", word_model, *lists, text=TEXT).lines
    assert "H" in ensemble[0].split()
    loaded = econmt.load(word_model, device="cpu")
    plain, wished = loaded.translate(["b c", econmt.Request("b c", constraints=["F F"])], glossary=lists[3])
    assert ("H" in plain.text.split(), "F F" in wished.text, "H" in wished.text.split()) == (True,) * 3


def test_alignments_are_pairs_of_words(call: Call, word_model: Path, subword_model: Path) -> None:
    for model in (word_model, subword_model):
        options = ("translate", "-m", model, "-b", 3, "--output-type", "translation_with_alignments")
        for line, source in zip(call(*options, text=TEXT).lines, TEXT.splitlines(), strict=True):
            text, pairs_ = line.split("\t")
            found = [tuple(map(int, pair.split("-"))) for pair in pairs_.split()]
            assert sorted({target for _, target in found}) == list(range(len(text.split())))
            assert all(0 <= word < len(source.split()) for word, _ in found)
        several = call(*options, "--nbest-size", 2, text="a b c\n").lines
        assert several[0].split(" ||| ")[4] == call(*options, text="a b c\n").lines[0].split("\t")[1]
        assert len(several) == 2


INPUT = "a b c\n\nd\nh g f e d\n"


def train(text: Path, folder: Path, *subwords: str) -> Path:
    """Trains a language model of the target side; returns its folder."""
    short = ("training.max_updates=8", "training.optimizer.learning_rate=20.0")
    data = ("data.text=trg", *short, f"data.prepared={folder / 'text'}")
    return TextRun(text, folder / "run", (*data, *subwords)).trained().folder.path


@pytest.fixture(scope="module")
def language_model(text: Path, word_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = f"data.subwords={{type: words, lists: [{word_model / 'vocab.target.txt'}]}}"
    return train(text, tmp_path_factory.mktemp("language"), words)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(torch.int8, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_a_language_model_beside_8_bits_computes_in_float32(
    word_model: Path, language_model: Path, given: torch.dtype, expected: torch.dtype
) -> None:
    target = econmt.load(word_model, device="cpu").vocabularies.target
    found = load_fusion(language_model, 0.3, torch.device("cpu"), given, target, None)
    assert (found.weight, found.precision) == (0.3, expected)


def test_the_command_is_the_python_interface(call: Call, word_model: Path, language_model: Path) -> None:
    options = "translate --lm-weight 2 --beam-size 4 --nbest-size 3 --output-type json --language-model"
    told = call(options, language_model, "-m", word_model, text=INPUT).succeeded()
    model = econmt.load(word_model, device="cpu")
    search = {"beam_size": 4, "nbest_size": 3}
    fused = model.translate(INPUT.splitlines(), language_model=language_model, lm_weight=2.0, **search)
    plain = model.translate(INPUT.splitlines(), **search)
    for line, each in zip(told.lines, fused, strict=True):
        record = json.loads(line)
        assert record["translation"] == each.text
        assert record["score"] == pytest.approx(each.score, abs=1e-4)
    assert [each.text for each in fused] != [each.text for each in plain]
    # The log-probability is the translation model's; the score has the language model's, too.
    reader = econmt.load(language_model, device="cpu")
    for source, each in zip(INPUT.splitlines(), fused, strict=True):
        if source:
            of_model = model.score([source], [each.text])[0].log_probability
            assert each.log_probability == pytest.approx(of_model, abs=1e-4)
            added = reader.score([each.text])[0].log_probability
            assert each.score == pytest.approx((of_model + 2.0 * added) / (len(each.tokens) + 1), abs=1e-4)
    unweighted = model.translate(INPUT.splitlines(), language_model=language_model, lm_weight=0.0, **search)
    assert [each.score for each in unweighted] == [each.score for each in plain]
    usual = model.translate(["a b"], language_model=language_model)[0].score
    assert usual == model.translate(["a b"], language_model=language_model, lm_weight=0.2)[0].score
    with pytest.raises(InputError, match="nowhere"):  # not the one that was kept
        model.translate(["a b"], language_model="nowhere", lm_weight=0.2)


def test_subwords_of_the_translation_model(text: Path, subword_model: Path, tmp_path: Path) -> None:
    file = subword_model / "subwords.model"
    folder = train(text, tmp_path, f"data.subwords={{type: bpe, models: [{file}]}}")
    model = econmt.load(subword_model, device="cpu")
    assert model.translate(["a b"], language_model=folder, lm_weight=0.5)[0].hypotheses


def test_what_is_refused(
    call: Call,
    text: Path,
    word_model: Path,
    subword_model: Path,
    language_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = train(text, tmp_path, "data.subwords={type: words, size: 9}")
    told = call("translate -m", word_model, "--language-model", other)
    vocabulary = word_model / "vocab.target.txt"
    assert told.out == ""
    refused(
        told,
        f"{other / 'vocab.txt'}: differs from {vocabulary}, whose tokens a language model must have; train the "
        f"language model with data.subwords.lists: [{vocabulary}]",
    )
    with pytest.raises(InputError, match="cannot be combined with restrict_lexicon"):
        econmt.load(word_model).translate(["a"], language_model=language_model, restrict_lexicon="l")


TERMS = Glossary({"b": "G H", "e": "A"})
LINES = ["a b c", "d", "h g f e d", "b e b"]


@pytest.fixture(scope="module")
def model(annotating: Path) -> econmt.TrainedModel:
    return econmt.load(annotating, device="cpu")


@pytest.fixture(scope="module")
def annotating(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that knows annotation, far too little trained to follow it."""
    keys = ("data.subwords={type: bpe, size: 40}", *SUBWORDS[1:], "data.annotate_terms.share=0.5")
    run = Run(text, tmp_path_factory.mktemp("annotating") / "run", keys)
    run.train()
    return run.folder.path


def counted(text: str) -> tuple[int, int]:
    return pairs(text).count("G H"), text.split().count("A")


def test_terms_are_annotated_and_forced_where_they_still_lack(model: econmt.TrainedModel) -> None:
    assert term_tag_ids(model.vocabularies.source)
    found = model.translate(LINES, glossary=TERMS, nbest_size=2)
    for each, line in zip(found, LINES, strict=True):
        for hypothesis in each.hypotheses:
            glossary, letters = counted(hypothesis.text), line.split()
            assert glossary[0] >= letters.count("b")
            assert glossary[1] >= letters.count("e")
        # Sources and attention are those of the sentence, not those of the annotated one.
        assert each.source_tokens == model.vocabularies.source.tokens(model.vocabularies.source.encode(line))
        assert each.attention.shape == (len(each.tokens) + 1, len(each.source_tokens) + 1)
        torch.testing.assert_close(each.attention.sum(dim=1), torch.ones(len(each.tokens) + 1))
    assert found[1].text == model.translate(LINES)[1].text


def test_annotation_alone_is_an_ordinary_search_of_another_source(model: econmt.TrainedModel) -> None:
    found = model.translate(LINES, glossary=TERMS, glossary_mode="annotate")
    b, e = "<term> G H </term>", "<term> A </term>"
    written = [f"a {b} c", "d", f"h g f {e} d", f"{b} {e} {b}"]
    assert [each.text for each in found] == [each.text for each in model.translate(written)]
    longest = max(len(model.vocabularies.source.encode(text)) for text in written)
    options: dict[str, Any] = {"glossary_mode": "annotate", "max_input_length": longest}
    assert [each.text for each in model.translate(LINES, glossary=TERMS, **options)] == [
        each.text for each in found
    ]
    # Draws cannot be constrained, but sources can be annotated.
    drawn = model.translate(LINES, glossary=TERMS, sample=True, seed=3)
    again = model.translate(written, sample=True, seed=3)
    assert [each.text for each in drawn] == [each.text for each in again]
    constrained = model.translate(LINES, glossary=TERMS, glossary_mode="constrain")
    assert counted(constrained[0].text)[0] >= 1


@pytest.mark.parametrize("mode", ["auto", "annotate", "constrain"])
def test_terms_that_are_there_change_nothing_in_any_mode(model: econmt.TrainedModel, mode: str) -> None:
    options: dict[str, Any] = {"min_output_length": 3}
    plain = model.translate(LINES, **options)
    terms = {line: each.text.split()[-1] for line, each in zip(LINES, plain, strict=True)}
    assert len(terms) == len(LINES)
    options |= {"glossary": Glossary(terms), "glossary_mode": mode}
    for found, expected in zip(model.translate(LINES, **options), plain, strict=True):
        assert found.source_tokens == expected.source_tokens
        rest: Any = {"hypotheses": [], "attention": None}
        assert found._replace(**rest) == expected._replace(**rest)
        assert torch.equal(found.attention, expected.attention)


def test_a_line_in_capitals_and_markup_keep_their_form(model: econmt.TrainedModel) -> None:
    found = model.translate(["A B C"], glossary=TERMS, restore_case=True)[0].text
    assert counted(found)[0] >= 1
    marked = model.translate(["a <b>b</b> c"], glossary=TERMS, markup=True)[0].text
    assert marked.count("<b>") == marked.count("</b>") == 1
    assert "term" not in marked


def test_the_server_annotates_the_terms_of_requests(model: econmt.TrainedModel) -> None:
    served = LoadedModels(model, Settings(glossary_mode="annotate"))
    request = econmt.Request("a b c", glossary=TERMS)
    answers = served.translate([request], TranslationJob(constrained=True))
    expected = model.translate(["a b c"], glossary=TERMS, glossary_mode="annotate")[0].text
    assert [getattr(each, "text", each) for each in answers] == [expected]


def test_a_file_of_terms_is_annotated_and_draws_are_not_constrained(
    call: Call, annotating: Path, model: econmt.TrainedModel, tmp_path: Path
) -> None:
    (tmp_path / "terms").write_text("b = G H\n")
    with pytest.raises(InputError, match="sample cannot be combined"):
        model.translate(["b"], glossary=TERMS, glossary_mode="constrain", sample=True)
    options = ("translate", "-m", annotating, "--glossary", tmp_path / "terms")
    assert counted(call(*options, text="a b\n").lines[0])[0] == 1
