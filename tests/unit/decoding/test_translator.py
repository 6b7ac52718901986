"""Lines in, lines out: order, blank lines, chunks, batches, warnings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from econmt.config.recipe import Data, Decoding
from econmt.data.text.glossary import Glossary
from econmt.data.text.vocabulary import EOS, PAD, SPECIAL_TOKENS, Vocabularies, Vocabulary, WordVocabulary
from econmt.decoding.batches import batches_by_length, evaluation_mode
from econmt.decoding.formats import format_translation
from econmt.decoding.requests import Request
from econmt.decoding.search import continuous
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.translation import one_line, with_small_prefix
from econmt.decoding.translator import Translator
from econmt.errors import EconmtError
from econmt.model import IncrementalModel
from tests.unit.decoding.test_real_model import make_model
from tests.unit.decoding.toy import ToyModel, ToyState


class Letters(Vocabulary):
    """A vocabulary of letters: 'a' is 4, 'b' is 5 and so on; blanks are nothing."""

    size = 30
    of_pieces = True

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 4 for letter in text if letter.isalpha()]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.tokens(ids))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [chr(ord("a") + i - 4) for i in ids]

    def written(self, text: str) -> list[str]:
        return [*text]


class Copying:
    """Copies the source, then ends; sees one source position after the other."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []

    def encode(self, source: Tensor, lengths: Tensor) -> CopyState:
        self.batches.append((source.shape[0], source.shape[1]))
        assert all(int(row[length - 1]) == EOS for row, length in zip(source, lengths, strict=True))
        assert all(not row[length:].any() for row, length in zip(source, lengths, strict=True))
        return CopyState(source, torch.arange(len(source)), 0)

    def step(self, tokens: Tensor, state: CopyState) -> tuple[Tensor, Tensor, CopyState]:
        source = state.source[state.owners]
        words = source[:, min(state.position, source.shape[1] - 1)]
        words = words.masked_fill(words == PAD, EOS)
        log_probs = torch.full((len(tokens), 30), -9.0)
        log_probs[torch.arange(len(tokens)), words] = -0.1
        attention = torch.zeros(source.shape)
        attention[:, min(state.position, source.shape[1] - 1)] = 1.0
        return log_probs, attention, CopyState(state.source, state.owners, state.position + 1)


class CopyState:
    def __init__(self, source: Tensor, owners: Tensor, position: int) -> None:
        self.source, self.owners, self.position = source, owners, position

    def select(self, rows: Tensor, cells: Tensor, width: int) -> CopyState:
        assert torch.equal(cells // width, self.owners[rows])
        return CopyState(self.source, self.owners[rows], self.position)

    def keep(self, sentences: Tensor) -> CopyState:
        return CopyState(self.source[sentences], torch.searchsorted(sentences, self.owners), self.position)


def data_section(max_length: int, languages: tuple[str, str] = ("en", "de")) -> Data:
    """The data section of the recipe of a model."""
    source, target = languages
    return Data(source=source, target=target, train=["train"], valid="valid", max_length=max_length)


def translator(model: object | None = None, **options: Any) -> Translator:
    """A translator with some of its arguments, or of the options of its search."""
    changes = {name: options.pop(name) for name in list(options) if name in SearchOptions.model_fields}
    search = options.pop("search", SearchOptions(beam_size=3, batch_size=4)).changed(**changes)
    return Translator([model or Copying()], Vocabularies(Letters(), Letters()), search, **options)


LINES = ["fox", "a", "", "elephant", "bee", "   ", "gnu", "hippopotamus", "\t", "yak", "ox"]


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_order_is_kept_whatever_the_batches(chunk_size: int, batch_size: int) -> None:
    done: list[int] = []
    made = translator(chunk_size=chunk_size, batch_size=batch_size)
    found = list(made.translate(LINES, done=done.append))
    assert sum(done) == len(LINES), "each line counts once, whether it is translated, copied or blank"
    assert [translation.text for translation in found] == [line.strip() for line in LINES]
    assert [translation.source_tokens for translation in found] == [list(line.strip()) for line in LINES]


def test_a_line_of_which_the_vocabulary_leaves_nothing_is_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "encode", lambda *_: [])
    done: list[int] = []
    (found,) = translator().translate(["a"], done=done.append)
    assert (found.text, found.hypotheses, sum(done)) == ("", [], 1)


def test_lines_without_words_are_copied_without_the_model() -> None:
    model = Copying()
    lines = ["3", " 1,234.56\t7 \u2013\u00a0 ", "--- \n*", "https://x.org/a", "tom@x.org."]
    done: list[int] = []
    found = list(translator(model, nbest_size=2).translate(lines, done=done.append))
    assert (model.batches, sum(done)) == ([], 5)
    copies = ["3", "1,234.56\t7 \u2013", "---  *", "https://x.org/a", "tom@x.org."]
    assert [each.text for each in found] == copies
    for each in found:
        (entry,) = each.hypotheses
        assert (each.score, each.log_probability, each.attention) == (0.0, 0.0, None)
        assert (entry.text, entry.score, entry.log_probability, entry.cut) == (each.text, 0.0, 0.0, False)
        assert "".join(entry.tokens) == "".join(each.source_tokens) == each.text
    pairs = [[(0, 0)], [(0, 0), (1, 1)], [(0, 0), (1, 1)]]
    assert [each.hypotheses[0].alignment for each in found[:3]] == pairs
    assert format_translation(found[0], "translation_with_alignments") == "3\t0-0"
    assert next(translator(model).translate(["3 a"])).text == "a", "a letter is a word"


NUMBERS = WordVocabulary([*SPECIAL_TOKENS, "3", "7", "drei", *(f"n{number}" for number in range(23))])


@pytest.mark.parametrize(
    ("request_fields", "options", "searched"),
    [
        ({"constraints": ["drei"]}, {}, True),
        ({"constraints": ["7", "3"]}, {}, False),
        ({"constraints": ["3", "3"]}, {}, True),
        ({"target_prefix": "drei"}, {}, True),
        ({"avoid": ["7"]}, {}, True),
        ({"avoid": ["drei"]}, {}, False),
        ({"glossary": Glossary({"3": "drei"})}, {}, True),
        ({"glossary": Glossary({"8": "drei"})}, {}, False),
        ({}, {"glossary": Glossary({"3": "drei"})}, True),
        ({}, {"search": SearchOptions(avoid=("7",))}, True),
        ({}, {"search": SearchOptions(avoid=("drei",))}, False),
        ({}, {"search": SearchOptions(block_ngram_repeat=2)}, False),
        ({}, {"search": SearchOptions(sample=0)}, False),
    ],
)
def test_a_copy_that_breaks_a_wish_is_left_to_the_model(
    request_fields: dict[str, Any], options: dict[str, Any], searched: bool
) -> None:
    model = Copying()
    search = options.pop("search", SearchOptions())
    made = Translator([model], Vocabularies(NUMBERS, NUMBERS), search, **options)
    (found,) = made.translate([Request("3 7", **request_fields)])
    assert bool(model.batches) == searched
    assert searched or found.text == "3 7"


def test_chunks_beginnings_in_capitals_and_batches_by_length() -> None:
    read = []

    def lines() -> Iterator[str]:
        for line in ["a", "b", "c", "d", "e"]:
            read.append(line)
            yield line

    stream = translator(chunk_size=2).translate(lines())
    assert next(stream).text == "a"
    assert read == ["a", "b"]
    assert [translation.text for translation in stream] == ["b", "c", "d", "e"]
    for given, wanted in (("EIN HUND", "Ein hund"), ("Ein HUND", "Ein HUND"), ("", "")):
        assert with_small_prefix(Request("A DOG", target_prefix=given), "de").target_prefix == wanted
    assert batches_by_length([3, 9, 1, 9, 4], 2, 1000) == [[1, 3], [4, 0], [2]]
    assert batches_by_length([], 2, 10) == []
    for lengths in product((1, 2, 3, 5), repeat=4):
        in_order = sorted(range(4), key=lambda index, lengths=lengths: -lengths[index])
        for size, tokens in product((1, 2, 3, 9), (1, 4, 6, 9, 99)):
            batches = batches_by_length(lengths, size, tokens)
            assert [index for batch in batches for index in batch] == in_order
            for batch, following in zip(batches, [*batches[1:], None], strict=True):
                longest = lengths[batch[0]]
                assert len(batch) <= size
                assert len(batch) == 1 or len(batch) * longest <= tokens
                if following is not None:  # no other sentence fits
                    assert len(batch) == size or (len(batch) + 1) * longest > tokens


def test_the_n_best_the_recipes_search_and_long_lines() -> None:
    (found,) = translator(search=SearchOptions(beam_size=3, nbest_size=3)).translate(["ab"])
    assert len(found.hypotheses) == 3
    assert found.text == found.hypotheses[0].text == "ab"
    assert found.tokens == ["a", "b"]
    assert found.score == found.hypotheses[0].score == pytest.approx(-0.1)
    assert found.log_probability == pytest.approx(-0.3)
    assert found.attention is not None
    assert found.attention.tolist() == torch.eye(3).tolist()
    given = {"beam_size": 2, "batch_size": 7, "length_penalty_alpha": 0.3, "max_input_length": 9}
    options = SearchOptions.from_recipe(Decoding(**given))  # type: ignore[arg-type]
    assert options == SearchOptions(**given)  # type: ignore[arg-type]
    assert (options.batch_size, options.max_input_length, options.beam_prune) == (7, 9, 0.0)
    warnings: list[str] = []
    made = translator(data=data_section(4), warn=warnings.append, chunk_size=2)
    lines = ["abc", "abcd", "a", "a", "abcdefgh", "a"]
    assert [translation.text for translation in made.translate(lines, "test.en")] == lines
    assert len(warnings) == 1
    assert warnings[0].startswith("test.en:5: 8 source tokens, more than the 4 ")


@pytest.mark.parametrize(("mode", "text"), [("cut", "a"), ("skip", "")])
def test_a_line_of_few_tokens_and_too_many_characters_is_told(mode: str, text: str) -> None:
    """A source of two tokens has at most 100 characters, blanks included."""
    warnings: list[str] = []
    made = translator(max_input_length=2, long_lines=mode, warn=warnings.append)
    lines = ["a" + " " * 100 + "b", "a" + " " * 98 + "b"]
    assert [each.text for each in made.translate(lines, "test.en")] == [text, "ab"]
    (warning,) = warnings
    assert warning.startswith("test.en:1: 102 characters, more than a source of 2 tokens may have")


def test_long_lines_are_counted_and_chunks_change_no_draw() -> None:
    warnings: list[str] = []
    made = translator(data=data_section(2), warn=warnings.append, chunk_size=9)
    list(made.translate(["abc"] * 5 + ["ab"], "test.en"))
    places = [line.partition(" ")[0] for line in warnings]
    assert places == ["test.en:1:", "test.en:2:", "test.en:3:", "test.en:"]
    assert warnings[3] == "test.en: further lines of more than 2 source tokens: 2"

    class Endless(ToyModel):
        """Never ends by itself."""

        def encode(self, source: Tensor, lengths: Tensor) -> ToyState:
            return super().encode(torch.zeros_like(source), lengths)

        def table(self, sentence: int, prefix: int) -> Tensor:
            return torch.tensor([-9.0, -9.0, -9.0, -90.0, 0.0, -9.0])

        def step(self, tokens: Tensor, state: ToyState) -> tuple[Tensor, Tensor, ToyState]:
            return super().step(tokens, state._replace(prefixes=torch.zeros_like(state.prefixes)))

    search = SearchOptions(beam_size=1, max_output_factor=5.0)
    (found,) = translator(Endless(), search=search, data=data_section(4)).translate(["a" * 40])
    assert len(found.tokens) == 50
    assert found.hypotheses[0].cut
    options = SearchOptions(sample=0, nbest_size=3, seed=5)
    lines = ["a", "b", "", "a", "b", "a"]

    def texts(chunk_size: int, batch_size: int) -> list[list[str]]:
        made = translator(ToyModel(), search=options, chunk_size=chunk_size, batch_size=batch_size)
        return [[candidate.text for candidate in found.hypotheses] for found in made.translate(lines)]

    assert texts(1, 1) == texts(2, 2) == texts(100, 100)
    assert texts(100, 100)[0] != texts(100, 100)[3]
    divided = translator(ToyModel(), search=options, divide=lambda line, _: (line.split(), list))
    pieces: Any = next(divided.translate(["a a"]))
    drawn = [[each.text for each in piece.hypotheses] for piece in pieces]
    assert drawn[0] == texts(1, 1)[0] != drawn[1]


def test_line_breaks_shift_nothing_and_a_watch_ends_all() -> None:
    assert one_line("a\nb\r\nc") == "a b  c"
    assert one_line(" a b \u3000\n") == "a b"
    assert one_line("a\u2028b") == "a\u2028b"

    class Left(Exception):
        pass

    def poll() -> object:
        raise Left

    for chosen in (False, True):
        made = translator(IncrementalModel(make_model("additive")), continuous=chosen)
        made.poll = poll
        with pytest.raises(Left):
            list(made.translate(["hen"] * 70))


class CasedLetters(Letters):
    """Capitals are other letters: 'A' is 17, and there are 13 of each."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - ord("a") + 4 if c.islower() else ord(c) - ord("A") + 17 for c in text if c.isalpha()]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [chr(ord("a") + i - 4) if i < 17 else chr(ord("A") + i - 17) for i in ids]


def test_lines_in_capitals_are_translated_as_if_they_were_not() -> None:
    lines = ["A BAD HIKE!", "Bad AB", "AB", "(B. A)", "12 3", "a b"]
    both = Vocabularies(CasedLetters(), CasedLetters())
    plain, restored = (
        Translator([Copying()], both, SearchOptions(beam_size=2, nbest_size=2, restore_case=case))  # type: ignore[list-item]
        for case in (False, True)
    )
    assert [found.text for found in plain.translate(lines)] == ["ABADHIKE", "BadAB", "AB", "BA", "12 3", "ab"]
    found = list(restored.translate(lines))
    assert [each.text for each in found] == ["ABADHIKE", "BadAB", "AB", "BA", "12 3", "ab"]
    assert "".join(found[0].source_tokens) == "Abadhike"
    assert "".join(found[2].source_tokens) == "AB", "a lone acronym"
    assert "".join(found[3].source_tokens) == "Ba"
    assert all(each.text == each.text.upper() for each in found[0].hypotheses)


@pytest.mark.parametrize(
    ("languages", "expected"),
    [(("tr", "tr"), "IŞIK İZMİR"), (("az-AZ", "en"), "IŞIK IZMIR"), (("en", "tr"), ""), (("en", "en"), "")],
)
def test_lines_in_capitals_follow_their_language(languages: tuple[str, str], expected: str) -> None:
    """The words of a Turkish line reach the model as the vocabulary has them, and a glossary finds them."""
    words = ["Işık", "izmir", "<2tr>", "<2de>", *(f"w{number}" for number in range(24))]
    both = Vocabularies(*[WordVocabulary([*SPECIAL_TOKENS, *words])] * 2)
    options = SearchOptions(beam_size=2, restore_case=True)
    made = [
        Translator([Copying()], both, options, data=data_section(100, languages), glossary=each)
        for each in (None, Glossary({"ışık": "w5"}))
    ]
    plain, steered = (next(each.translate(["IŞIK İZMİR"])) for each in made)
    if expected:
        assert plain.source_tokens == ["Işık", "izmir"]
        assert plain.text == expected
        (tagged,) = made[0].translate([Request("IŞIK İZMİR", source_prefix="<2tr>")])
        assert tagged.text == "<2TR> IŞIK İZMİR"
        assert "W5" in steered.text.split()
    else:
        assert plain.source_tokens == steered.source_tokens != ["Işık", "izmir"]
        assert steered.text == plain.text
    prefix = with_small_prefix(Request("", target_prefix="IŞIK İLE"), languages[1]).target_prefix
    assert (prefix == "Işık ile") == (languages[1] == "tr")


def test_broken_parameters_are_told_and_modes_come_back() -> None:
    class Broken(ToyModel):
        def table(self, sentence: int, prefix: int) -> Tensor:
            return torch.full((self.size,), torch.nan)

    with pytest.raises(EconmtError, match=r"input:2: the model gives no finite probability"):
        list(translator(Broken()).translate(["", "a"]))
    on, off = nn.Dropout(), nn.Dropout().eval()
    with evaluation_mode([on, off, object()]):
        assert not on.training
    assert (on.training, off.training) == (True, False)
    found, blank = translator().translate(["ab", ""])
    assert [format_translation(each, "translation") for each in (found, blank)] == ["ab", ""]
    assert [format_translation(each, "score") for each in (found, blank)] == ["-0.100000\tab", "0.000000\t"]


def test_what_continuous_batches_cannot_follow_is_searched_in_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(continuous, "WORTH", 1)
    monkeypatch.setattr(continuous, "SHORTEST", 4)
    model = IncrementalModel(make_model("additive"))
    penalties: list[dict[str, object]] = [{"brevity_penalty_weight": 5.0}, {"coverage_penalty_weight": 3.0}]
    for options in (*penalties, {"beam_prune": 0.1}, {"beam_search_stop": "first"}):
        made = (translator(model, beam_size=3, continuous=chosen, **options) for chosen in (False, True))
        plain, found = ([each.score for each in one.translate(["dog", "bee"])] for one in made)
        assert found == plain, options


def test_continuous_batches_translate_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "WORTH", 3)
    monkeypatch.setattr(continuous, "SHORTEST", 4)
    model = IncrementalModel(make_model("additive"))
    # Of the lines of nine and more tokens there are too few.
    lines = [
        *("dog", "", "bee", "a bee", "abcdefghijklm", "gnom", "  ", "hen hen", "if", "nag", "lamb", "ram"),
        *("a",),
    ]
    expected, found = (
        list(translator(model, continuous=chosen, batch_size=2).translate(lines)) for chosen in (False, True)
    )
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("text", "tokens", "source_tokens"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.score == pytest.approx(theirs.score, abs=1e-5)
