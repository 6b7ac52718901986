"""``econmt embeddings``: prints the nearest neighbours of tokens, or writes all embeddings to a file."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Literal

import torch

from econmt.checkpoint.checkpoints import load_task
from econmt.config import limits
from econmt.data.text.vocabulary import Vocabulary
from econmt.errors import InputError, printable
from econmt.model import TranslationModel
from econmt.options.option_groups import argument, option
from econmt.options.shared_options import ModelOption
from econmt.training.vector_files import write_vectors


def embeddings(
    model: ModelOption,
    tokens: list[str] | None = argument(
        None, help="Tokens to look up; without any they are read from standard input."
    ),
    side: Literal["source", "target"] = option(
        "source",
        help="Embeddings of the source or target vocabulary; a language model has target embeddings only.",
    ),
    factor: int | None = option(
        None,
        help="Embeddings of a stream of source factors instead, numbered from 1.",
        min=1,
        max=limits.FACTORS,
    ),
    count: int = option(
        5, "--neighbours", "-k", help="Number of neighbours of each token.", min=1, max=limits.WORDS
    ),
    output: Path | None = option(
        None, "--output", "-o", help="Write all tokens and vectors to this file: .npz, .safetensors, or text."
    ),
) -> None:
    """Print the tokens whose embeddings are nearest to those of the given tokens, nearest first.

    The columns, separated by tabs, are token, neighbour and cosine similarity. Tokens are entries of the vocabulary, so
    subwords in most models. model.initialization.source_embedding and target_embedding read the files of --output.

    \b
    Example:
      econmt embeddings -m runs/multi30k dog cat
    """
    loaded = load_task(model)
    vocabulary, table = loaded.vocabularies.target, "embedding"
    factors = loaded.vocabularies.factors
    if factor is not None:
        if factor > len(factors):
            raise InputError(
                f"--factor {factor}: the number of source factors of {model} is {len(factors)}; give a lower number"
            )
        if side == "target":
            raise InputError("--side target: --factor is for the source; leave out one of them")
        vocabulary, table = factors[factor - 1], f"source_factor_embeddings.{factor - 1}"
    elif isinstance(loaded.model, TranslationModel):
        vocabulary, table = getattr(loaded.vocabularies, side), f"{side}_embedding"
    weight = loaded.model.get_submodule(table).get_parameter("weight").detach()
    entries = vocabulary.tokens(range(vocabulary.size))
    if output is not None:
        if tokens:
            raise InputError("--output writes all tokens; leave the tokens out")
        write_vectors(output, entries, weight)
        print(printable(output))
        return
    for token in tokens or sys.stdin.read().split():
        number = _id_of(token, entries, vocabulary)
        cosines = torch.nn.functional.cosine_similarity(weight, weight[number][None], dim=1)
        cosines[number] = -torch.inf
        values, neighbours = cosines.topk(min(count, len(entries) - 1))
        for value, neighbour in zip(values.tolist(), neighbours.tolist(), strict=True):
            print(f"{printable(entries[number])}\t{printable(entries[neighbour])}\t{value:.4f}")


def _id_of(token: str, entries: list[str], vocabulary: Vocabulary) -> int:
    """Returns the id of a token, which may lack SentencePiece's mark of the beginning of a word."""
    for written in (token, f"\u2581{token}"):
        if written in entries:
            return entries.index(written)
    near = difflib.get_close_matches(token, entries, n=3)
    pieces = vocabulary.tokens(vocabulary.encode(token))
    hint = f"similar tokens: {', '.join(near)}" if near else f"it is cut into {' '.join(pieces)}"
    raise InputError(f"token '{token}': not in the vocabulary; {hint}")
