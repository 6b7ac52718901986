"""``econmt embeddings`` and ``econmt extract``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from econmt.data.text.subwords import load_vocabularies
from econmt.training.vector_files import read_vectors
from tests.unit.cli.conftest import Call


def test_the_nearest_tokens(call: Call, word_model: Path) -> None:
    ended = call("embeddings", "-m", word_model, "--side", "target", "-k", 3, "A", "H")
    table = load_file(word_model / "params.best.safetensors")["target_embedding.weight"].astype(np.float64)
    vocabulary = load_vocabularies(word_model).target
    known = vocabulary.tokens(range(vocabulary.size))
    expected = []
    for token in "AH":
        own = table[known.index(token)]
        norms = np.linalg.norm(table, axis=1) * np.linalg.norm(own)
        cosines = table @ own / np.maximum(norms, 1e-30)
        order = [place for place in np.argsort(-cosines) if known[place] != token][:3]
        expected += [f"{token}\t{known[place]}\t{cosines[place]:.4f}" for place in order]
    assert ended.lines == expected
    assert call("embeddings", "-m", word_model, "--side", "target", "-k", 3, text="A\nH\n").lines == expected


def test_subwords_need_no_mark(call: Call, subword_model: Path) -> None:
    vocabulary = load_vocabularies(subword_model).source
    piece = next(
        token
        for token in vocabulary.tokens(range(4, vocabulary.size))
        if token[0] == "\u2581" and len(token) > 1
    )
    marked, bare = (call("embeddings", "-m", subword_model, token).lines for token in (piece, piece[1:]))
    assert len(marked) == 5
    assert piece[1:] in vocabulary.tokens(range(vocabulary.size)) or marked == bare


@pytest.mark.parametrize("suffix", ["txt", "npz", "safetensors"])
def test_embeddings_are_written_as_recipes_read_them(
    call: Call, word_model: Path, tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"vectors.{suffix}"
    assert call("embeddings", "-m", word_model, "-o", file).lines == [str(file)]
    table = torch.from_numpy(load_file(word_model / "params.best.safetensors")["source_embedding.weight"])
    vocabulary = load_vocabularies(word_model).source
    known = vocabulary.tokens(range(vocabulary.size))
    found = read_vectors(file, known, table.shape[1])
    assert list(found) == known
    assert torch.equal(torch.stack(list(found.values())), table)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_parameters_are_those_of_the_model(call: Call, word_model: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"out.{suffix}"
    patterns = [r"encoder\..*", "output.bias"]
    assert call("extract", "-m", word_model, "-c", "last", *patterns, "-o", file).lines == [str(file)]
    found = dict(np.load(file)) if suffix == "npz" else load_file(file)
    every = load_file(word_model / "params.00008.safetensors")
    assert found.keys() == {name for name in every if name.startswith("encoder.") or name == "output.bias"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, every[name])
    listed = call("extract", "-m", word_model, "output.*").lines
    assert listed == ["output.bias\t12\tfloat32", "output.weight\t12 x 8\tfloat32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embeddings", "Q"], "token 'Q': not in the vocabulary; it is cut into <unk>"),
        (["embeddings", "a", "-o", "x.npz"], "--output writes all tokens"),
        (["extract", "nothing"], "no parameter matches 'nothing'; there are "),
        (["extract", "("], "name '(': no regular expression"),
        (["extract", "-o", "x.csv"], "--output x.csv: unknown suffix; give .npz or .safetensors"),
        (["extract", "-c", "77"], "no checkpoint '77'"),
    ],
)
def test_what_cannot_be_used(call: Call, word_model: Path, arguments: list[str], message: str) -> None:
    ended = call(arguments[0], "-m", word_model, *arguments[1:])
    assert ended.code == 2
    assert message in ended.err
