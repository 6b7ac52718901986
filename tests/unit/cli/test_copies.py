"""Unknown words of a source have entries of their own in each sentence, so that a model can copy them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import econmt
from econmt.config.recipe import load_recipe
from econmt.data.batching.store import prepare
from econmt.data.text.vocabulary import SPECIAL_TOKENS, UNK, Vocabularies, WordVocabulary
from econmt.errors import InputError
from econmt.evaluation.scoring import token_ids
from econmt.training.run import run_recipe
from tests.unit.cli.conftest import Call
from tests.unit.training.tiny import Run, write_text

JOINT = "data.subwords={{type: words, source: 60, joint: true, copies: {}, min_count: 2}}"


@pytest.fixture
def both() -> Vocabularies:
    """A vocabulary of two words, and entries for two unknown words of a sentence."""
    words = WordVocabulary([*SPECIAL_TOKENS, "<copy1>", "<copy2>", "a", "b"])
    return Vocabularies(words, words)


def test_unknown_words_of_a_source_are_known_in_its_target(both: Vocabularies) -> None:
    source = "Ann a Bob Ann Cy"
    assert both.encode_sources([source, "b"]) == [[4, 6, 5, 4, UNK], [7]]
    assert both.encode_targets(["Bob a Ann Dan Cy", "Ann"], [source, "b"]) == [[5, 6, 4, UNK, UNK], [UNK]]
    assert both.decode_targets([[5, 6, 4, UNK], [4, 7]], [source, "Eve"]) == ["Bob a Ann <unk>", "Eve b"]
    assert both.resolved([4, 5, 6], "b Eve") == ([4, UNK, 6], ["Eve", "<unk>", "a"])
    assert both.resolved([4], "a") == ([UNK], ["<unk>"])


def test_names_of_entries_in_a_text_are_words(both: Vocabularies) -> None:
    assert both.encode_sources(["<copy2> <unk>"]) == [[4, 5]]
    assert both.encode_targets(["<unk> <copy2> <copy1>"], ["<copy2> <unk>"]) == [[5, 4, UNK]]
    assert both.decode_targets([[4, 5]], ["<copy2> <unk>"]) == ["<copy2> <unk>"]


def test_tokens_of_a_translation_have_ids_again(both: Vocabularies) -> None:
    encode = token_ids(both)
    for source in ("Ann a Bob", "<copy2> b <unk>"):
        tokens = both.resolved([4, 6, 5, UNK], source)[1]
        assert encode(" ".join(tokens), source) == ([4, 6, 5, UNK] if "Ann" in source else [4, 6, 5, 5])
    with pytest.raises(KeyError):
        encode("Ann", "Bob")


def test_vocabularies_without_such_entries_are_as_before() -> None:
    words = WordVocabulary([*SPECIAL_TOKENS, "a", "<copy1>"])
    both = Vocabularies(words, words)
    assert both.encode_targets(["a x <copy1>"], ["x"]) == [[4, UNK, 5]]
    assert both.resolved([4, UNK], "x") == ([4, UNK], ["a", "<unk>"])


def test_a_joint_vocabulary_of_words(tmp_path: Path) -> None:
    write_text(tmp_path, {"train": 60, "valid": 5})
    run = Run(
        tmp_path,
        tmp_path / "run",
        (JOINT.format(3), "model.weight_tying=src_trg_softmax", "training.max_updates=2"),
    )
    prepared = prepare(run.recipe, tmp_path / "p", [tmp_path], show_progress=False)
    source, target = prepared.vocabularies.sides
    assert source is target
    tokens = source.tokens(range(source.size))
    assert tokens[:7] == [*SPECIAL_TOKENS, "<copy1>", "<copy2>", "<copy3>"]
    assert sorted(tokens[7:]) == sorted("abcdefghABCDEFGH")
    assert source.copies == 3
    run_recipe(run.recipe, [tmp_path], console=run.console)


def names(folder: Path, seed: int, counts: dict[str, int]) -> None:
    """Writes pairs of a few words with one or two names that occur nowhere else; the target is the source reversed."""
    draw = random.Random(seed)
    for split, count in counts.items():
        lines = []
        for _ in range(count):
            words = [draw.choice("abcd") for _ in range(draw.randint(1, 3))]
            for _ in range(draw.randint(1, 2)):
                words.insert(draw.randint(0, len(words)), "".join(draw.choices("mnopqrstuvw", k=9)))
            lines.append(words)
        (folder / f"{split}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{split}.trg").write_text("".join(" ".join(line[::-1]) + "\n" for line in lines))


@pytest.mark.slow
@pytest.mark.parametrize(
    "copying",
    [pytest.param(True, id="mixture"), pytest.param(False, id="entries", marks=pytest.mark.thorough)],
)
def test_names_that_were_never_seen_are_copied(tmp_path: Path, call: Call, copying: bool) -> None:
    names(tmp_path, 3, {"train": 600, "valid": 10, "test": 40})
    keys = (
        JOINT.format(4),
        f"model.decoder.copy_attention={str(copying).lower()}",
        "model.embedding=24",
        "model.encoder.size=24",
        "model.decoder.size=24",
        "model.dropout=0.0",
        "training.batch.size=20",
        "training.optimizer.learning_rate=0.02",
        "training.max_updates=260",
        "training.checkpoint_interval=130",
        "decoding.max_output_factor=2.0",
    )
    run = Run(tmp_path, tmp_path / "run", keys)
    run.train()
    model = econmt.load(run.folder.path, device="cpu")
    sources, expected = ((tmp_path / f"test.{side}").read_text().splitlines() for side in ("src", "trg"))
    found = [each.text for each in model.translate(sources)]
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= 36

    shown = call("translate", "-m", run.folder.path, "--output-type", "json", text="\n".join(sources) + "\n")
    lines = [json.loads(line) for line in shown.lines]
    assert [" ".join(line["tokens"]) for line in lines] == [line["translation"] for line in lines]
    pairs = "".join(f"{one}\t{line['translation']}\n" for one, line in zip(sources, lines, strict=True))
    log_probabilities = [line["log_probability"] for line in lines]
    for options in ((), ("--target-tokens",)):
        scored = call("score", "-m", run.folder.path, *options, text=pairs).lines
        assert [float(score) for score in scored] == pytest.approx(log_probabilities, abs=1e-4)
    scores = [pair.log_probability for pair in model.score(sources, [line["translation"] for line in lines])]
    assert scores == pytest.approx(log_probabilities, abs=1e-4)
    refused = call("export", "--runtime", run.folder.path, tmp_path / "runtime")
    assert "the runtime does not support its data.subwords.copies" in refused.err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("{type: words, copies: 3}", "copies 3 needs joint: true"),
        ("{type: words, joint: true, target: 9}", "target 9 has no effect with joint: true"),
        ("{type: words, joint: true, lists: [a, b]}", "lists has two files and joint is true; give one"),
        ("{type: words, joint: true, copies: 1001}", "copies"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, keys: str, message: str) -> None:
    Run(tmp_path, tmp_path / "run")
    with pytest.raises(InputError, match=message):
        load_recipe(tmp_path / "run.yaml", [f"data.subwords={keys}"])
    noise = ["data.noise={upper: 0.1}", JOINT.format(2)]
    with pytest.raises(InputError, match=r"data\.noise changes words that data\.subwords\.copies counts"):
        load_recipe(tmp_path / "run.yaml", ["training.bucket_width=null", *noise])
