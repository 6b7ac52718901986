"""Source factors from files to batches, or refused in one line; and IBM model 1 against its definition."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from econmt.bench.training import vocabulary_sizes
from econmt.config.recipe import Recipe, load_recipe
from econmt.data.batching.batches import Batch, training_batches, valid_batches
from econmt.data.batching.store import PreparedData, prepare
from econmt.data.batching.token_store import token_type
from econmt.data.text import lexicon
from econmt.data.text.corpus import Corpus, find_companions
from econmt.data.text.lexicon import EMPTY_WORD, learn_lexicon
from econmt.data.text.source_factors import count_of_ids, encode_sources, with_factors_of, word_numbers
from econmt.data.text.vocabulary import (
    EOS,
    PAD,
    SPECIAL_TOKENS,
    UNK,
    SentencePieceVocabulary,
    Vocabularies,
    WordVocabulary,
)
from econmt.errors import InputError
from econmt.factored_ids import joined_ids, separate_ids
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask

WORDS = ("lower", "lowest", "newer", "newest", "wide", "wider", "slowly", "größer", "eins", "zwei")
TAGS = {word: ("long" if len(word) > 4 else "short", word[0]) for word in WORDS}
"""Two factors, which tell words apart that look alike in part, so that a wrong place shows."""

SUBWORDS = "data.subwords={type: bpe, size: 60}"
WHOLE = "data.subwords={type: words, source: 50, target: 50}"


def sentences(count: int, seed: int) -> list[list[str]]:
    draw = random.Random(seed)
    return [draw.choices(WORDS, k=draw.randint(1, 6)) for _ in range(count)]


def put(folder: Path, split: str, rows: Sequence[Sequence[str]]) -> None:
    text = [" ".join(row) for row in rows]
    columns = {"src": text, "trg": [line.upper() for line in text]}
    for number, name in enumerate(("len", "first")):
        columns[name] = [" ".join(TAGS[word][number] for word in row) for row in rows]
    for name, lines in columns.items():
        (folder / f"{split}.{name}").write_text("".join(line + "\n" for line in lines))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for split, count, seed in (("train", 60, 1), ("more", 40, 2), ("valid", 9, 3), ("test", 5, 4)):
        put(tmp_path, split, sentences(count, seed))
    return tmp_path


MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def make_recipe(text: Path) -> MakeRecipe:
    def make(*overrides: str) -> Recipe:
        given = (
            "data.source=src",
            "data.target=trg",
            f"data.train=[{text}/train, {text}/more]",
            f"data.valid={text}/valid",
            f"data.test={text}/test",
            f"data.prepared={text}/prepared",
            "data.source_factors=[len, first]",
            "model.source_factors_num_embed=[2, 3]",
            "training.batch={type: sentence, size: 8}",
        )
        return load_recipe("quickstart", [*given, *overrides])

    return make


def prepared_of(recipe: Recipe) -> PreparedData:
    assert recipe.data.prepared is not None
    return prepare(recipe, Path(recipe.data.prepared), [], show_progress=False)


def check(vocabularies: Vocabularies, ids: Sequence[int], sentence: Sequence[str] | None = None) -> None:
    """Every token has the factors of the word that it is of."""
    sizes = vocabularies.source.size, *vocabularies.factor_sizes
    words, *factors = separate_ids(np.asarray(ids), sizes)
    said = vocabularies.source.decode(words.tolist()).split(" ")
    assert sentence is None or said == list(sentence)
    numbers = word_numbers(vocabularies.source.tokens(words.tolist()), vocabularies.source)
    assert numbers[-1] + 1 == len(said)
    for stream, (vocabulary, own) in enumerate(zip(vocabularies.factors, factors, strict=True)):
        assert vocabulary.tokens(own.tolist()) == [TAGS[said[number]][stream] for number in numbers]


def check_rows(vocabularies: Vocabularies, batch: Batch) -> None:
    for row, length in zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True):
        check(vocabularies, row[: length - 1])


def test_joined_ids_are_separated_again() -> None:
    sizes = (11, 5, 7)
    parts = [torch.randint(0, size, (3, 4)) for size in sizes]
    whole = joined_ids(parts[0], parts[1:], sizes)
    assert all(map(torch.equal, separate_ids(whole, sizes), parts))
    assert int(whole.max()) < 11 * 5 * 7
    assert joined_ids(10, [4, 6], sizes) == 11 * 5 * 7 - 1
    assert separate_ids(9, (11,)) == [9]
    assert joined_ids(EOS, [PAD, PAD], sizes) == EOS


def test_ids_have_the_smallest_type_that_holds_them() -> None:
    sizes = {1 << 16: "<u2", (1 << 16) + 1: "<u4", 1 << 32: "<u4", (1 << 32) + 1: "<u8"}
    assert {size: token_type(size).str for size in sizes} == sizes
    large = WordVocabulary([str(number) for number in range(3000)])
    with pytest.raises(InputError, match=r"data\.source_factors: vocabularies of .* are too large together"):
        count_of_ids(Vocabularies(large, large, (large,) * 5))
    fewer, nine_bits = (WordVocabulary([*SPECIAL_TOKENS, *map(str, range(count))]) for count in (507, 508))
    assert count_of_ids(Vocabularies(fewer, large, (nine_bits,) * 6)) == 511 << 54
    with pytest.raises(InputError, match="too large together"):
        count_of_ids(Vocabularies(nine_bits, large, (nine_bits,) * 6))


@pytest.mark.parametrize("subwords", [SUBWORDS, WHOLE], ids=["bpe", "words"])
def test_every_token_has_the_factors_of_its_word(make_recipe: MakeRecipe, text: Path, subwords: str) -> None:
    prepared = prepared_of(make_recipe(subwords))
    rows = [*sentences(60, 1), *sentences(40, 2)]
    for index in (0, 59, 60, 99):
        check(prepared.vocabularies, prepared.train.pair(index)[0].tolist(), rows[index])
    assert prepared.statistics["train"]["source_unknown"] == 0
    assert list(prepared.valid_text.factors) == [
        (text / f"valid.{name}").read_text().split("\n")[:-1] for name in ("len", "first")
    ]
    assert len(prepared.test_text.factors) == 2
    (batch,) = valid_batches(prepared.valid, 16)
    check_rows(prepared.vocabularies, batch)
    for row, length in zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True):
        assert row[length - 1] == EOS
        assert not any(row[length:])


def test_unknown_words_are_counted_and_examples_of_many_factors_fit(make_recipe: MakeRecipe) -> None:
    prepared = prepared_of(make_recipe("data.subwords={type: words, source: 9, target: 50}"))
    known = {*prepared.vocabularies.source.tokens(range(prepared.vocabularies.source.size))}
    words = [word for row in (*sentences(60, 1), *sentences(40, 2)) for word in row]
    assert prepared.statistics["train"]["source_tokens"] == len(words)
    assert prepared.statistics["train"]["source_unknown"] == sum(word not in known for word in words) > 0
    names = json.dumps([f"f{number}" for number in range(20)])
    widths = f"model.source_factors_num_embed={[4] * 20}"
    recipe = load_recipe("multi30k", [f"data.source_factors={names}", widths])
    source, target, *factors = vocabulary_sizes(recipe)
    batch = TranslationTask(recipe, source, target, factor_sizes=tuple(factors)).example(Shape(3, 4, 5))
    assert int(batch.source.min()) >= 0
    sizes = (source, *factors)
    for part, size in zip(separate_ids(batch.source, sizes), sizes, strict=True):
        assert 0 <= int(part.min()) <= int(part.max()) < size


MIXED = "data.mixing={weights: [[1, 3]], epoch_pairs: 40}", "data.filters={min_words: 2, duplicates: pairs}"


@pytest.mark.parametrize("mixed", [(), (WHOLE, *MIXED)])
def test_bpe_dropout_mixtures_and_filters_keep_factors(make_recipe: MakeRecipe, mixed: Sequence[str]) -> None:
    recipe = make_recipe(*mixed or ["data.subwords={type: bpe, size: 60, dropout: 0.3}"])
    prepared = prepared_of(recipe)
    assert (prepared.statistics["train"].get("few_words", 0) > 0) == bool(mixed)
    batches = training_batches(recipe, prepared)
    lengths: set[tuple[int, int]] = set()
    for batch in itertools.islice(batches, 2 * batches.batches_per_epoch):
        check_rows(prepared.vocabularies, batch)
        lengths |= {*zip(batch.indices.tolist(), batch.source_lengths.tolist(), strict=True)}
    assert mixed or len(lengths) > len(prepared.train), "cuts change"


def test_a_file_that_does_not_fit_is_named_with_its_line(make_recipe: MakeRecipe, text: Path) -> None:
    places = {"more": (sentences(40, 2)[3], 4), "test": (sentences(5, 4)[0], 1), "train": ([], 1)}
    for name, change, message in (
        ("more.first", lambda old: [*old[:3], "l n", *old[4:]], "{0}/more.first:4: 2 source factors for {1}"),
        ("train.len", lambda lines: [*lines, "long"], "{0}/train.len has 61 lines but {0}/train.src has 60"),
        ("test.len", lambda lines: [""] * len(lines), "{0}/test.len:1: 0 source factors for {1}"),
    ):
        file, split = text / name, name.partition(".")[0]
        before, (row, number) = file.read_text(), places[split]
        file.write_text("".join(line + "\n" for line in change(before.split("\n")[:-1])))
        words = f"{len(row)} word{'s' if len(row) != 1 else ''}"
        counted = f"{words} of {text}/{split}.src:{number}; give one for each"
        with pytest.raises(InputError, match=re.escape(message.format(text, counted))):
            prepared_of(make_recipe(WHOLE))
        file.write_text(before)


def test_absent_files_and_text_without_lines_are_refused(make_recipe: MakeRecipe, text: Path) -> None:
    (text / "more.len").unlink()
    with pytest.raises(InputError, match=r"more\.len not found"):
        prepared_of(make_recipe(WHOLE))
    (text / "train.src").unlink()
    (text / "train.tmx").write_text("<tmx/>")
    with pytest.raises(InputError, match=r"train\.tmx: data\.source_factors needs a line-based corpus"):
        prepared_of(make_recipe(WHOLE))


def test_keys_that_do_not_go_together_are_named(make_recipe: MakeRecipe) -> None:
    for override, message in {
        "model.source_factors_num_embed=[2]": "data.source_factors has 2 entries but "
        "model.source_factors_num_embed has 1",
        "model.source_factors_combine=sum": "source_factors_combine: sum adds embeddings, so each width must",
        "data.source_factors=[len, src]": "source_factors: 'src' is also the suffix of other files",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)):
            make_recipe(override)


def place(number: int, stream: int | None) -> str:
    return f"t:{number + 1}" if stream is None else f"f{stream}:{number + 1}"


class TestEncoding:
    """Of texts with their factors."""

    def test_blank_texts_and_unknown_factors(self, make_recipe: MakeRecipe) -> None:
        vocabularies = prepared_of(make_recipe(WHOLE)).vocabularies
        found = encode_sources(vocabularies, ["", " ", "wide"], [(), ("", ""), ("new", "w")], place)
        assert found[:2] == [[], []]
        sizes = vocabularies.source.size, *vocabularies.factor_sizes
        assert separate_ids(found[2][0], sizes)[1] == UNK

    def test_subwords_of_any_text(self, make_recipe: MakeRecipe) -> None:
        """Blanks of all kinds, letters that are unknown, and SentencePiece's own sign for a blank."""
        vocabularies = prepared_of(make_recipe(SUBWORDS)).vocabularies
        source = vocabularies.source
        assert isinstance(source, SentencePieceVocabulary)
        text = "  wide   漢字 \u00a0lower\u2581newest "
        # "\u00a0" within the line is no space between words, and U+2581 is one.
        lines = ("long long long long", "w ? l n")
        (ids,) = encode_sources(vocabularies, [text], [lines], place)
        sizes = source.size, *vocabularies.factor_sizes
        words, _, firsts = zip(*(separate_ids(token, sizes) for token in ids), strict=True)
        numbers = word_numbers(source.tokens(words), source)
        assert [vocabularies.factors[1].tokens([first])[0] for first in firsts] == [
            ["w", "<unk>", "l", "n"][number] for number in numbers
        ]
        with pytest.raises(InputError, match="remove the character U\\+2581"):
            encode_sources(vocabularies, ["wide \u2581 wide"], [("long long", "w w")], place)

    def test_a_text_that_is_cut(self, make_recipe: MakeRecipe) -> None:
        vocabularies = prepared_of(make_recipe(WHOLE)).vocabularies
        lines = ("long short long", "l w n")
        (whole,) = encode_sources(vocabularies, ["lower wide newest"], [lines], place)
        (cut,) = encode_sources(vocabularies, ["lower wide newest"], [lines], place, 10)
        assert cut == whole[:2]

    def test_another_cut(self, make_recipe: MakeRecipe) -> None:
        vocabularies = prepared_of(make_recipe(SUBWORDS)).vocabularies
        source = vocabularies.source
        assert isinstance(source, SentencePieceVocabulary)
        (ids,) = encode_sources(vocabularies, ["eins wide"], [("short short", "e w")], place)
        letters = [source.processor.PieceToId(piece) for piece in "\u2581eins\u2581wide"]
        check(vocabularies, with_factors_of(ids, letters, source), ["eins", "wide"])


def test_files_beside_the_source_come_first(make_recipe: MakeRecipe, text: Path, tmp_path: Path) -> None:
    """Another folder of the search may have those of another version of the text."""
    older = tmp_path / "older"
    older.mkdir()
    (older / "train.len").write_text("wrong\n")
    corpus = Corpus(text / "train.src", text / "train.trg")
    for prefix in ("train", "folder/train"):
        found = find_companions(corpus, prefix, ["len"], "data.source_factors", [older, text])
        assert found == (text / "train.len",)
    corpus = Corpus(older / "train.src", older / "train.trg")
    apart = find_companions(corpus, "train", ["first"], "data.source_factors", [older, text])
    assert apart == (text / "train.first",)


def test_streams_in_another_order_are_refused() -> None:
    words, tags, first = (
        WordVocabulary([*SPECIAL_TOKENS, *tokens])
        for tokens in (WORDS, ("long", "short"), ("l", "n", "w", "s"))
    )
    vocabularies = Vocabularies(words, words, (tags, first))
    texts = ["lower newest", "wide"]

    right = encode_sources(vocabularies, texts, [("long long", "l n"), ("short", "w")], place)
    assert [len(ids) for ids in right] == [2, 1]
    with pytest.raises(InputError) as refused:
        encode_sources(vocabularies, texts, [("l n", "long long"), ("w", "short")], place)
    assert str(refused.value) == (
        "f0:1: the model's stream 1 of source factors knows none of its tokens, but stream 2 knows all of them; "
        "give the streams in the order of data.source_factors"
    )
    told: list[str] = []
    encode_sources(vocabularies, ["", "wide"], [(), ("medium", "w")], place, warn=told.append)
    none = (
        "f0:2: the model's stream 1 of source factors knows none of its tokens; is it another set of factors?"
    )
    assert told == [none]


PAIRS = [([5, 6], [7, 8]), ([5], [7]), ([6, 4, 6], [8, 9, 8, 4]), ([4], []), ([], [9]), ([5, 4], [7, 9])]
PAIRS += [([6], [9, 8, 5]), ([6, 5], [9, 4])]


def naive(iterations: int) -> dict[int, dict[int, float]]:
    """t(target | source), link by link."""
    table: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(lambda: 1.0))
    for _ in range(iterations):
        counts: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for source, target in PAIRS:
            words = [EMPTY_WORD, *source]
            for word in target:
                total = sum(table[other][word] for other in words)
                for other in words:
                    counts[other][word] += table[other][word] / total
        for source, row in counts.items():
            table[source] = defaultdict(float, {word: n / sum(row.values()) for word, n in row.items()})
    return table


@pytest.mark.parametrize("links", [1, 5, 1 << 22])
def test_the_most_probable_come_first(links: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexicon, "_LINKS", links)
    found = learn_lexicon(PAIRS, (7, 10), keep=3, iterations=4)
    assert found.shape == (7, 3)
    assert learn_lexicon([([5], [7, 6])], (6, 8), 2)[5].tolist() == [6, 7], "equal ones by number"
    expected = naive(4)
    for source in range(7):
        row = expected.get(source, {})
        ranked = sorted(row, key=lambda word: (-row[word], word))[:3]
        assert found[source].tolist() == [*ranked, *[PAD] * (3 - len(ranked))]


def test_a_dictionary_is_found() -> None:
    draws = np.random.default_rng(1)
    sources = [draws.permutation(np.arange(4, 24))[:6].tolist() for _ in range(400)]
    table = learn_lexicon([(ids, [word + 20 for word in ids[::-1]]) for ids in sources], (24, 44), 5)
    assert table[4:, 0].tolist() == list(range(24, 44))
    assert not table[3].any()
