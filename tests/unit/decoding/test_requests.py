"""Requests in lines of JSON, glossaries, and what becomes of them on the way to a search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from econmt.data.text.glossary import Glossary, Occurrence, occurrences, parse_glossary, read_glossary
from econmt.data.text.subwords import train_vocabularies
from econmt.data.text.vocabulary import SPECIAL_TOKENS, UNK, Vocabularies, WordVocabulary
from econmt.decoding.constraints.batch import DecodingConstraints
from econmt.decoding.constraints.inclusion import Phrase
from econmt.decoding.constraints.phrases import Spelling, read_avoid_list
from econmt.decoding.constraints.tokens import ConstraintCompiler
from econmt.decoding.requests import Request, read_request
from econmt.errors import InputError
from tests.unit.data.test_subwords import data

TEXT = ["ein Hund läuft.", "die Hunde laufen (schnell).", "狗猫走", "der Mann und ein Haus", "猫走狗"] * 20


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    kind = data(type="bpe", size=60)
    return train_vocabularies(kind, lambda: ((text, text) for text in TEXT), tmp_path_factory.mktemp("words"))


def test_every_field_is_read_and_others_are_passed_on() -> None:
    line = '{"text": "a b", "constraints": ["c d"], "avoid": ["e"], "target_prefix": "f", "id": [1, {"x": null}]}'
    assert read_request(line, "x:1") == Request("a b", ["c d"], ["e"], "f", {"id": [1, {"x": None}]})
    assert read_request('{"text": "", "factors": null}', "x:1").is_plain
    assert read_request('{"text": "a b", "factors": ["x y"]}', "x:1").factors == ["x y"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a b", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "text: "),
        ('{"text": 3}', "text: expected"),
        ('{"id": 3}', "x:7: text: missing"),
        ('{"text": "a", "constraints": "b"}', "constraints: expected a list"),
        ('{"text": "a", "constraints": ["b", 1]}', "constraints[1]: expected"),
        ('{"text": "a", "avoid": [" "]}', "avoid[0] is blank"),
        ('{"text": "a", "constraint": ["b"]}', "did you mean constraints?"),
        ('{"text": "a", "AVOID": ["b"]}', "unknown field AVOID; did you mean avoid?"),
        ('{"text": "a", "factors": "x"}', "factors: expected a list"),
        ('{"text": "a", "factors": ["\\u0000"]}', "factors[0]: the character U+0000 is not allowed in text"),
        ('{"text": "a", "glossary": {"b": " "}}', "x:7: glossary: 'b': the translation is blank"),
        ('{"text": "a", "restrict_lexicon": "x"}', "restrict_lexicon is not supported by econmt"),
        ('{"text": "a\\u0000"}', "text: the character U+0000"),
        ('{"text": "a", "target_prefix": "\\ud800"}', "target_prefix: the character U+D800"),
        ('{"text": "a", "id": NaN}', "NaN is not a finite number"),
        ('{"text": "a", "id": 1e999}', "1e999 is not a finite number"),
        ('{"text": "a", "text": "b"}', "the key 'text' is given twice"),
        ('{"text": "a", "avoid": ["b"], "avoid": ["c"]}', "the key 'avoid' is given twice"),
        ('{"text": "a", "id": {"n": 1, "n": 2}}', "the key 'n' is given twice"),
        ('{"text": "a", "id": ' + "[" * 100_000 + "]" * 100_000 + "}", "x:7"),
        (json.dumps({"text": "a", "avoid": ["b"] * 1001}), "avoid: "),
    ],
)
def test_what_cannot_be_used_names_its_line_and_field(line: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read_request(line, "x:7")
    (told,) = caught.value.lines
    assert told.startswith("x:7")
    assert words in told
    assert len(told) < 400


@pytest.mark.parametrize("value", ["null", "[]", '""'])
def test_fields_that_say_nothing_are_no_matter(value: str) -> None:
    assert read_request(f'{{"text": "a", "restrict_lexicon": {value}}}', "x:7").text == "a"


@pytest.mark.parametrize("text", ["漢字", "漢", "漢 Hund", "\u2581", "カ"])
def test_what_the_vocabulary_lacks_is_refused_wherever_it_stands(subwords: Vocabularies, text: str) -> None:
    sentence_constraints = ConstraintCompiler(subwords.target)
    for request in (Request("a", constraints=[text]), Request("a", target_prefix=text)):
        with pytest.raises(InputError, match="that the target vocabulary lacks"):
            sentence_constraints.of(request, "line 1")


def test_phrases_are_cut_as_in_a_sentence(subwords: Vocabularies) -> None:
    target = subwords.target
    spelling = Spelling(target)
    for phrase in ("Hund", "ein Hund", "Mann und", "  Haus "):
        assert list(spelling.encode(phrase)) == target.encode(phrase)
        assert spelling.ends_word(phrase)
    for phrase in ("狗", "猫走"):
        assert "".join(target.tokens(spelling.encode(phrase))) == phrase
        assert not spelling.ends_word(phrase)
    assert not spelling.ends_word("läuft.")
    assert UNK in spelling.encode("Hund☃")
    target = subwords.target
    sentence_constraints = ConstraintCompiler(target, (), Glossary({"dog": "Hund"}))
    assert sentence_constraints.of(Request("a cat"), "x:1") == DecodingConstraints()
    constraints = sentence_constraints.of(Request("a dog", ["ein Haus"], target_prefix="der"), "x:1")
    phrases = [Phrase(tuple(target.encode(words)), True) for words in ("Hund", "ein Haus")]
    assert constraints.phrases == tuple(phrases)
    assert constraints.prefix == tuple(target.encode("der"))
    both = ConstraintCompiler(target, ["Mann"]).of(Request("a", avoid=["Haus"]), "x:1").avoidances
    found = [any(each.is_in(target.encode(word)) for each in both) for word in ("Mann", "Haus", "Hund")]
    assert found == [True, True, False]


def test_wishes_that_cannot_be_had_and_words_that_are_whole(subwords: Vocabularies) -> None:
    compiler = ConstraintCompiler(subwords.target, ["Mann"])
    lacks = "x:1: the constraint 'Hund☃' has characters or words that the target vocabulary lacks"
    holds = "contains an avoided phrase"
    for request, words in (
        (Request("a", ["Hund☃"]), lacks),
        (Request("a", target_prefix="☃"), "x:1: target_prefix '☃'"),
        (Request("a", ["ein Hund läuft"], ["Hund"]), f"x:1: the constraint 'ein Hund läuft' {holds}"),
        (Request("a", ["der Mann"]), f"'der Mann' {holds}"),
        (Request("a", target_prefix="der Mann und"), f"target_prefix 'der Mann und' {holds}"),
        (Request("a", "Hund"), "x:1: constraints: expected a list"),
    ):
        with pytest.raises(InputError, match="x:1") as caught:
            compiler.of(request, "x:1")
        assert words in caught.value.lines[0]
    unwritable = Glossary({"dog": "Hund☃"})
    with pytest.raises(InputError, match="glossary: dog = Hund☃ has characters"):
        ConstraintCompiler(subwords.target, (), unwritable)
    with pytest.raises(InputError, match="terms:3: dog = Hund☃ has characters"):
        ConstraintCompiler(subwords.target, (), parse_glossary(["a = der", "", "dog = Hund☃"], "terms"))
    compiler = ConstraintCompiler(subwords.target)
    with pytest.raises(InputError, match="x:1: the glossary's translation 'Hund☃' has characters"):
        compiler.of(Request("a dog", ["ein Haus"], glossary=unwritable), "x:1")
    with pytest.raises(InputError, match="x:1: the constraint 'Haus☃' has characters"):
        compiler.of(Request("a cat", ["Haus☃"]), "x:1")
    compiler = ConstraintCompiler(subwords.target, ["Hund"])
    assert compiler.of(Request("a", ["Hunde"]), "x:1").phrases
    assert compiler.of(Request("a", target_prefix="ein Hund"), "x:1").prefix
    spelling = Spelling(WordVocabulary([*SPECIAL_TOKENS, "ein", "Hund"]))
    assert spelling.encode("ein Hund") == (4, 5)
    assert not spelling.ends_word("Hund")
    assert not spelling.joins.any()


def targets(glossary: Glossary, text: str) -> list[str]:
    """Returns the translations of the terms in a text."""
    return [each.target for each in glossary.occurrences(text)]


def test_terms_are_separated_and_found_whole() -> None:
    lines = ["# a comment = no term", "", "dog\tHund = gut", "cat = Katze, klein", " E = mc = Formel"]
    lines += ["hot dog, Wurst ", '"yes, please","ja, ""bitte"""', 'say "no",nein']
    assert len(parse_glossary(lines, "terms").terms) == 6
    found = targets(parse_glossary(lines, "terms"), 'Dog! E cat yes, please say "no", hot dog')
    assert found == ["Hund = gut", "mc = Formel", "Katze, klein", 'ja, "bitte"', "nein", "Wurst"]
    assert targets(parse_glossary(['"a = b", c'], "terms"), "a = b") == ["c"]
    glossary = Glossary({"dog": "Hund", "hot dog": "Wurst", "US": "USA", "us": "uns", "狗": "Hund"})
    assert targets(glossary, "A dog and a hot  dog, Dog-dog dogs.") == ["Hund", "Wurst", "Hund", "Hund"]
    assert targets(glossary, "US us Us") == ["USA", "uns", "uns"]
    assert targets(Glossary({"New York": "NY"}), "New york, New York") == ["NY"]
    both = [Occurrence("Wurst", 2, 10), Occurrence("Hund", 14, 15)]
    assert glossary.occurrences(" a hot  dog, 我的狗。") == both
    unsorted = Glossary({"us": "uns", "US": "USA", "hot": "heiß", "hot dog": "Wurst"})
    assert targets(unsorted, "US us hot hot dog") == ["USA", "uns", "heiß", "Wurst"]
    assert targets(glossary, "") == []


def test_a_sentence_s_own_glossary_has_priority_and_files_of_terms_and_phrases(tmp_path: Path) -> None:
    own, general = Glossary({"dog": "Köter"}), Glossary({"hot dog": "Wurst", "dog": "Hund", "cat": "Katze"})
    words = WordVocabulary([*SPECIAL_TOKENS, "Köter", "Wurst", "Hund", "Katze"])
    terms = ConstraintCompiler(words, (), general).terms(Request("cat, hot dog", glossary=own))
    assert terms == occurrences("cat, hot dog", [own, general])
    assert [each.target for each in terms] == ["Katze", "Köter"]
    assert [each.target for each in occurrences("cat, hot dog", [general])] == ["Katze", "Wurst"]
    (tmp_path / "terms").write_text("dog\tHund\n\n  hot dog \tWurst\ndog\tHund\n", encoding="utf-8")
    assert targets(read_glossary(tmp_path / "terms"), "hot dog dog") == ["Wurst", "Hund"]
    (tmp_path / "avoid").write_text("Hund\n\nder  Mann \nHund\n", encoding="utf-8")
    assert read_avoid_list(tmp_path / "avoid") == ("Hund", "der Mann")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dog Hund\n", ":1: 1 column in 'dog Hund'; expected a term and its translation"),
        ("a=b\na\tb\tc\n", ":2: 3 columns in"),
        ("a,b,c\n", ":1: 3 columns in"),
        ('# a\n"dog, Hund\n', ":2: no CSV that can be read"),
        ("a\tb\ndog\t \n", ":2: the translation is blank; give both sides"),
        ("dog =\n", ":1: the translation is blank"),
        ("\tHund\n", ":1: the term is blank"),
        ("dog\tHund\ndog\tHund\ndog\tKöter\n", ":3: 'dog' has another translation in line 1"),
    ],
)
def test_terms_that_cannot_be_used_name_their_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "terms").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_glossary(tmp_path / "terms")
    assert f"{tmp_path / 'terms'}{words}" in caught.value.lines[0]
