"""``econmt embeddings``: what a model takes for alike."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from econmt.checkpoint.checkpoints import load_task
from econmt.cli.option_groups import with_option_groups
from econmt.cli.options import ModelOption
from econmt.config import limits
from econmt.data.text.subwords import Vocabulary
from econmt.errors import InputError, printable
from econmt.model import TranslationModel
from econmt.training.vector_files import write_vectors


@with_option_groups
def embeddings(
    model: ModelOption,
    tokens: Annotated[list[str] | None, typer.Argument(help="Tokens; none: those of standard input.")] = None,
    side: Annotated[
        Literal["source", "target"], typer.Option(help="Of a language model all are target embeddings.")
    ] = "source",
    factor: Annotated[
        int | None,
        typer.Option(min=1, max=limits.FACTORS, help="Of this stream of source factors instead, from 1."),
    ] = None,
    count: Annotated[int, typer.Option("--neighbours", "-k", min=1, max=limits.WORDS, help="Of each.")] = 5,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write all tokens and vectors here instead: .npz, .safetensors, else text."
        ),
    ] = None,
) -> None:
    """Print the tokens whose embeddings are nearest to those given, with the cosine of the angle, the nearest first.

    Columns: token, neighbour, cosine, separated by tabs. Tokens are those of the vocabulary: subwords where the model
    has them. What --output writes is what model.initialization.source_embedding and target_embedding read.

    \b
    Example:
      econmt embeddings -m runs/multi30k dog cat
    """
    loaded = load_task(model)
    own, table = loaded.vocabularies.target, "embedding"
    factors = loaded.vocabularies.factors
    if factor is not None:
        if factor > len(factors):
            raise InputError(
                f"--factor {factor}: {model} reads {len(factors) or 'no'} streams of source factors"
            )
        if side == "target":
            raise InputError("--side target: --factor is of the source; leave out one of them")
        own, table = factors[factor - 1], f"source_factor_embeddings.{factor - 1}"
    elif isinstance(loaded.model, TranslationModel):
        own, table = getattr(loaded.vocabularies, side), f"{side}_embedding"
    weight = loaded.model.get_submodule(table).get_parameter("weight").detach()
    known = own.tokens(range(own.size))
    if output is not None:
        if tokens:
            raise InputError("--output writes all tokens; leave the tokens out")
        write_vectors(output, known, weight)
        print(printable(output))
        return
    for token in tokens or sys.stdin.read().split():
        place = _place(token, known, own)
        cosines = torch.nn.functional.cosine_similarity(weight, weight[place][None], dim=1)
        cosines[place] = -torch.inf
        values, places = cosines.topk(min(count, len(known) - 1))
        for value, other in zip(values.tolist(), places.tolist(), strict=True):
            print(f"{printable(known[place])}\t{printable(known[other])}\t{value:.4f}")


def _place(token: str, known: list[str], vocabulary: Vocabulary) -> int:
    """The id of a token, which may lack SentencePiece's mark of a word's beginning."""
    for written in (token, f"\u2581{token}"):
        if written in known:
            return known.index(written)
    near = difflib.get_close_matches(token, known, n=3)
    pieces = vocabulary.tokens(vocabulary.encode(token))
    advice = f"near it are {', '.join(near)}" if near else f"it is cut into {' '.join(pieces)}"
    raise InputError(f"token '{token}': not in the vocabulary; {advice}")
