"""What is wished of translations, through the command line and from Python."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import econmt
from econmt.data.text.glossary import Glossary
from econmt.errors import InputError
from econmt_ops.backends import c as native
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_translate import failure

TEXT = "a b c\nd\n\nh g f e d\n"


def objects(*rows: dict[str, object] | str) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def test_lines_of_json_go_in_and_come_out(call: Call, word_model: Path) -> None:
    given = objects(
        {"text": "a b c", "id": 7},
        {"text": "d", "constraints": ["A B", "H"], "translation": "mine"},
        "",
        {"text": "h g f e d", "target_prefix": "C C", "avoid": ["A"]},
    )
    ended = call("translate", "-m", word_model, "--json-input", "--output-type", "json", text=given)
    first, second, blank, last = (json.loads(line) for line in ended.lines)
    plain = call("translate", "-m", word_model, "--output-type", "json", text=TEXT).lines
    assert first.pop("id") == 7
    assert rounded(first) == rounded(json.loads(plain[0]))  # a search with wishes adds up otherwise
    assert {"A B", "H"} <= {*second["translation"].split(), *pairs(second["translation"])}
    assert blank["translation"] == ""
    assert last["translation"].startswith("C C")
    assert "A" not in last["translation"].split()
    texts = call("translate", "-m", word_model, "--json-input", text=given).lines
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


def rounded(tree: Any) -> Any:
    """A tree of JSON whose numbers with a point have four digits behind it."""
    if isinstance(tree, dict):
        return {name: rounded(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [rounded(value) for value in tree]
    return round(tree, 4) if isinstance(tree, float) else tree


def pairs(text: str) -> list[str]:
    words = text.split()
    return [f"{one} {other}" for one, other in pairwise(words)]


def test_a_line_of_json_that_is_wrong_is_named_and_loses_nothing(call: Call, word_model: Path) -> None:
    good = ("translate", "-m", word_model, "--json-input")
    ended = call(*good, "--chunk-size", 1, text=objects({"text": "a"}, '{"text": 1}'))
    failure(ended, "standard input:2: text: expected text, found 1")
    assert len(ended.lines) == 1
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
    with pytest.raises(InputError, match="glossary: z = Ä has characters"):
        econmt.load(word_model, device="cpu").translate([], glossary=Glossary({"a": "A", "z": "Ä"}))


def test_penalties_reach_the_search(call: Call, word_model: Path) -> None:
    wanted: dict[str, Any] = {"brevity_penalty_weight": 2.0, "brevity_penalty_constant_length_ratio": 1.5}
    wanted |= {"coverage_penalty_weight": 0.5, "beam_search_stop": "first", "beam_prune": 3.0}
    options = [str(word) for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", value)]
    ended = call("translate", "-m", word_model, *options, "--output-type", "json", text=TEXT)
    model = econmt.load(word_model, device="cpu")
    expected_ones, plain_ones = (model.translate(TEXT.splitlines(), **more) for more in (wanted, {}))
    for line, expected, plain in zip(ended.lines, expected_ones, plain_ones, strict=True):
        found = json.loads(line)
        assert (found["translation"], found["score"]) == (expected.text, expected.score)
        assert not expected.hypotheses or expected.score < plain.score


def test_capitals_and_unknown_words_reach_the_translator(call: Call, word_model: Path) -> None:
    plain = call("translate", "-m", word_model, text="a b c d\n").lines
    found = call("translate", "-m", word_model, "--restore-case", text="A B C D\n").lines
    assert found == [call("translate", "-m", word_model, text="A b c d\n").lines[0].upper()]
    assert call("translate", "-m", word_model, "--replace-unk", text="a b c d\n").lines == plain


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


def test_from_python(word_model: Path, tmp_path: Path) -> None:
    model = econmt.load(word_model, device="cpu")
    (tmp_path / "terms").write_text("a\tG\n")
    requests = [econmt.Request("a b", constraints=["H H"]), "a", econmt.Request("d", target_prefix="E")]
    found = model.translate(requests, avoid=["B"], glossary=tmp_path / "terms", beam_size=2)
    assert "H H" in found[0].text
    assert all("G" in found[number].text.split() for number in (0, 1))
    assert found[2].text.startswith("E")
    assert "B" not in " ".join(each.text for each in found).split()
    with pytest.raises(InputError, match="input:1"):
        model.translate([econmt.Request("a", constraints=["ä"])])
