"""Alignments and weights from files to batches: with their pairs, by tokens, in every epoch, or refused in one line."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from econmt.config.recipe import Recipe, load_recipe
from econmt.data.batching.batches import Batch, training_batches
from econmt.data.batching.pair_guides import PairGuides, _word_numbers
from econmt.data.batching.store import PreparedData, prepare
from econmt.data.text.guides import WEIGHT_UNIT, check_words, parse_links, parse_weight
from econmt.data.text.source_factors import words_of_line
from econmt.data.text.vocabulary import BOS, EOS, PAD, SPECIAL_TOKENS, WordVocabulary
from econmt.errors import InputError
from econmt.tasks.protocol import Shape
from econmt.tasks.registry import make_task
from econmt.tasks.translation import TranslationTask
from tests.unit.data.test_source_factors import SUBWORDS, WHOLE, WORDS, MakeRecipe


def put(folder: Path, split: str, count: int, seed: int) -> None:
    """Targets are the source's words backwards; each is aligned to its origin, the last also to the first word."""
    draw = random.Random(seed)
    columns: dict[str, list[str]] = {"src": [], "trg": [], "align": [], "weights": []}
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(1, 6))
        columns["src"].append(" ".join(words))
        columns["trg"].append(" ".join(reversed(words)).upper())
        links = {(number, len(words) - 1 - number) for number in range(len(words))} | {(0, 0)}
        own = random.Random(" ".join(words))  # equal pairs have equal guides
        if own.random() < 0.2:
            links = set()
        columns["align"].append(" ".join(f"{source}-{target}" for source, target in sorted(links)))
        columns["weights"].append(str(own.choice([0, 0.5, 1, 2.25])))
    for name, lines in columns.items():
        (folder / f"{split}.{name}").write_text("".join(line + "\n" for line in lines))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for split, count, seed in (("train", 40, 1), ("more", 20, 2), ("valid", 9, 3)):
        put(tmp_path, split, count, seed)
    return tmp_path


@pytest.fixture
def make_recipe(text: Path) -> MakeRecipe:
    def make(*overrides: str) -> Recipe:
        given = (
            "data.source=src", "data.target=trg", "data.train=[train, more]", "data.valid=valid", "data.test=null",
            "data.alignment=align", "data.weights=weights", f"output={text}/run", "training.batch.size=7",
        )  # fmt: skip
        return load_recipe("quickstart", [*given, *overrides])

    return make


def made(recipe: Recipe, text: Path) -> PreparedData:
    return prepare(recipe, text / "prepared", [text], show_progress=False)


def expected(text: Path) -> dict[tuple[str, str], tuple[set[tuple[int, int]], float]]:
    """Links and weight of each pair of texts."""
    found = {}
    for split in ("train", "more"):
        names = ("src", "trg", "align", "weights")
        columns = [(text / f"{split}.{name}").read_text().split("\n") for name in names]
        for source, target, links, weight in zip(*columns, strict=True):
            if source:
                pairs = {(int(a), int(b)) for a, b in (each.split("-") for each in links.split())}
                found[source, target] = pairs, float(weight)
    return found


def check(batch: Batch, prepared: PreparedData, wanted: dict[tuple[str, str], object], tag: str = "") -> int:
    """Compares each row of a batch with the files, token by token; returns the number of links."""
    count = 0
    assert batch.alignment.dtype == batch.weights.dtype == torch.int64
    assert batch.alignment.shape == (*batch.target_output.shape, batch.source.shape[1])
    for row in range(len(batch.indices)):
        sides = []
        for ids, vocabulary in zip(
            (batch.source[row], batch.target_output[row]), prepared.vocabularies.sides, strict=True
        ):
            tokens = [i for i in ids.tolist() if i not in (PAD, BOS, EOS)]
            words, numbers = 0, []
            for token in vocabulary.tokens(tokens):
                words += bool(numbers) and (token.startswith("▁") or isinstance(vocabulary, WordVocabulary))
                numbers.append(words)
            sides.append((vocabulary.decode(tokens), numbers))
        (source, source_words), (target, target_words) = sides
        links, weight = wanted[source.removeprefix(f"{tag} "), target]  # type: ignore[misc]
        shift = int(bool(tag) and source.startswith(tag))
        naive = np.zeros(batch.alignment.shape[1:], np.int64)
        for t, target_word in enumerate(target_words):
            for s, source_word in enumerate(source_words):
                naive[t, s] = (source_word - shift, target_word) in links
        np.testing.assert_array_equal(batch.alignment[row].numpy(), naive)
        assert batch.weights[row].item() * WEIGHT_UNIT == pytest.approx(weight)
        count += int(naive.sum())
    return count


@pytest.mark.sampled(6)
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        (SUBWORDS,),
        (WHOLE,),
        ("data.subwords={type: bpe, size: 60, dropout: 0.3}",),
        ("data.subwords={type: bpe, size: 60, joint: false}", "training.bucket_width=4"),
        (SUBWORDS, "data.mixing={weights: [[1, 3]], epoch_pairs: 30}"),
        (SUBWORDS, "data.tags=[<XX>, <XX>]"),
    ],
)
def test_batches_hold_what_the_files_say(
    make_recipe: MakeRecipe, text: Path, overrides: tuple[str, ...], trimmed: bool
) -> None:
    recipe = make_recipe(*overrides)
    prepared = made(recipe, text)
    batches = training_batches(recipe, prepared)
    links = 0
    for _ in range(2 * batches.batches_per_epoch):
        batch = next(batches)
        batch = batch.trimmed() if trimmed else batch
        links += check(batch, prepared, expected(text), "<XX>" if "<XX>" in overrides[-1] else "")
    assert links > 200
    assert batches.worst_batch().alignment is not None


def test_source_factors_change_no_alignment(make_recipe: MakeRecipe, text: Path) -> None:
    """Ids of sources with factors are those of the tokens beside multiples of the vocabulary's size."""
    prepared = made(make_recipe(SUBWORDS), text)
    guides = PairGuides.of(prepared.train, prepared.train_links, prepared.vocabularies)
    assert guides is not None
    indices = np.arange(20)
    plain = prepared.train.gather(indices)
    shape = plain.source.shape[1] + 2, plain.target.shape[1] + 1
    expected = guides.alignment(indices, plain, shape)
    factored = plain._replace(source=plain.source + 3 * prepared.vocabularies.source.size)
    np.testing.assert_array_equal(guides.alignment(indices, factored, shape), expected)
    assert expected is not None
    assert expected.any()
    ids = np.array([[0, 0, 1, 0], [1, 0, 1, 1], [3, 2, 2, 3]])
    numbers = [[0, 0, 1, 1], [0, 0, 1, 2], [0, 0, 0, 1]]
    assert _word_numbers(ids, np.array([False, True])).tolist() == numbers


def test_parts_and_shares_keep_their_rows(make_recipe: MakeRecipe, text: Path) -> None:
    recipe = make_recipe(SUBWORDS)
    batch = next(training_batches(recipe, made(recipe, text)))
    last = batch.share(1, 2)
    rows = -(-len(batch.indices) // 2)
    here = len(batch.indices) - rows
    assert torch.equal(last.alignment[:here], batch.alignment[rows:])
    assert last.alignment[here:].sum() == last.weights[here:].sum() == 0
    assert torch.equal(last.weights[:here], batch.weights[rows:])


def test_the_store_is_used_again_until_a_file_changes(make_recipe: MakeRecipe, text: Path) -> None:
    recipe = make_recipe(SUBWORDS)
    made(recipe, text)
    before = (text / "prepared" / "train.weights").stat().st_mtime_ns
    made(recipe, text)
    assert (text / "prepared" / "train.weights").stat().st_mtime_ns == before
    with gzip.open(text / "more.align.gz", "wt") as stream:
        stream.write((text / "more.align").read_text().replace("0-0", "", 1))
    (text / "more.align").unlink()
    prepared = made(recipe, text)
    assert (text / "prepared" / "train.weights").stat().st_mtime_ns != before
    assert prepared.valid_links is not None
    (text / "valid.align").unlink()
    assert made(recipe, text).valid_links is None
    plain = made(make_recipe(SUBWORDS, "data.alignment=null", "data.weights=null"), text)
    assert plain.train_links is None
    assert not plain.train.weighted


def test_left_out_pairs_take_their_guides_along(make_recipe: MakeRecipe, text: Path) -> None:
    lines = (text / "train.src").read_text().split("\n")
    lines[0], lines[3] = "", "lower " * 200
    (text / "train.src").write_text("\n".join(lines))
    for name, first in (("align", ""), ("weights", "0.125")):
        _, *rest = (text / f"train.{name}").read_text().split("\n")
        (text / f"train.{name}").write_text("\n".join([first, *rest]))
    recipe = make_recipe(SUBWORDS, "data.empty_lines=skip", "data.filters={duplicates: pairs}")
    prepared = made(recipe, text)
    assert len(prepared.train) < 59
    batches = training_batches(recipe, prepared)
    for _ in range(batches.batches_per_epoch):
        check(next(batches), prepared, expected(text))


def test_an_example_has_guides(make_recipe: MakeRecipe) -> None:
    batch = TranslationTask(make_recipe(), 50, 50).example(Shape(2, 5, 4))
    assert batch.alignment.shape == (2, 4, 5)
    assert (batch.weights * WEIGHT_UNIT).tolist() == [1.0, 1.0]


def test_links_are_parsed() -> None:
    assert parse_links(" 0-1 2-0\t0-1 ", "f:1", 3, 2) == [(0, 1), (2, 0)]
    assert parse_links("", "f:1", 3, 2) == []
    assert [parse_weight(text, "f:1") for text in ("1", " 0.5\n", "1e-3", ".25", "4000", "0")] == [
        1_000_000, 500_000, 1_000, 250_000, 4_000_000_000, 0,
    ]  # fmt: skip
    # The nearest multiple of a millionth: no product of binary fractions is cut.
    assert [parse_weight(text, "f:1") for text in ("0.3", "1.1", "2.3", "8.7", "0.0000006", "4e-7", "3.", "3e3")] == [
        300_000, 1_100_000, 2_300_000, 8_700_000, 1, 0, 3_000_000, 3_000_000_000,
    ]  # fmt: skip
    for text in ("4000.0000001", "4001", "-1", "4e3000", "1e", ".", "1 2", "inf", "+1", "\u0663"):
        message = re.escape(f"f:1: expected a weight from 0 to 4000, found {text!r}")
        with pytest.raises(InputError, match=message):
            parse_weight(text, "f:1")
    many = [(source, target) for source in range(20) for target in range(20)]
    assert parse_links(" ".join(f"{a}-{b}" for a, b in reversed(many)), "f:1", 20, 20) == many
    assert parse_links("2-1", "f:1", 3, 2) == [(2, 1)]
    wrong = {"3-0": "source word 3, but the sentence has 3", "0-2": "target word 2, but the sentence has 2"}
    for link, word in wrong.items():
        with pytest.raises(InputError, match=f"f:1: {link} names {word} words between spaces"):
            parse_links(f"2-1 {link}", "f:1", 3, 2)


def test_words_of_tokens_are_those_of_the_text() -> None:
    vocabulary = WordVocabulary([*SPECIAL_TOKENS, "a", "b"])
    assert len(words_of_line(" a\u2581 b ", vocabulary)) == 2
    check_words(vocabulary.encode("a b x"), vocabulary, 3, "f:1")
    check_words([], vocabulary, 3, "f:1")
    for words in (2, 4):
        with pytest.raises(InputError, match=rf"^f:1: its tokens have 3 words and its text {words}, so that"):
            check_words(vocabulary.encode("a b x"), vocabulary, words, "f:1")


@pytest.mark.parametrize("tags", ["[]", "[<XX>, <XX>]"])
def test_lines_that_are_wrong(make_recipe: MakeRecipe, text: Path, tags: str) -> None:
    """Words count without tags."""
    words = len((text / "train.src").read_text().split("\n")[0].split())
    for name, line, message in (
        ("align", f"{words}-0", f"train.align:1: {words}-0 names source word {words}, but the sentence has"),
        ("align", "0-0 x-1", "train.align:1: expected pairs of words as 0-0 1-2, found 'x-1'"),
        ("weights", "nan", "train.weights:1: expected a weight from 0 to 4000, found 'nan'"),
        ("weights", "", "train.weights:1: expected a weight from 0 to 4000, found ''"),
    ):
        path = text / f"train.{name}"
        before = path.read_text()
        path.write_text("\n".join([line, *before.split("\n")[1:]]))
        with pytest.raises(InputError, match=re.escape(message)):
            made(make_recipe(SUBWORDS, f"data.tags={tags}"), text)
        path.write_text(before)


def test_files_that_do_not_fit(make_recipe: MakeRecipe, text: Path) -> None:
    path = text / "train.weights"
    for lines, message in ((39, "has 39 lines but"), (42, "has 42 lines but"), (None, "not found")):
        path.unlink()
        if lines is not None:
            path.write_text("1\n" * lines)
        with pytest.raises(InputError, match=message):
            made(make_recipe(SUBWORDS), text)
    for suffix in ("src", "align"):
        with pytest.raises(InputError, match=f"weights: '{suffix}' is also the suffix of other files"):
            make_recipe(f"data.weights={suffix}")


def test_evaluation_has_the_alignments_of_its_own_split(make_recipe: MakeRecipe, text: Path) -> None:
    put(text, "test", 9, seed=4)
    recipe = make_recipe(WHOLE, "data.test=test")
    prepared = made(recipe, text)
    task = make_task(recipe, prepared)
    for split, are_aligned in (("valid", True), ("test", False)):
        batches = list(task.evaluation(prepared, split).batches)
        assert batches
        assert all((batch.alignment is not None) == are_aligned for batch in batches)
