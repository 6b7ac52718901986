"""Reads files of word vectors: text of word2vec, GloVe and fastText."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from econmt.errors import InputError

_FORM = "use text, one token and its values per line"


def read_vectors(path: Path, wanted: Collection[str], width: int) -> dict[str, Tensor]:
    """Reads the vectors (width,) float32 of the ``wanted`` tokens in a file; the first one if a token is repeated.

    The file may begin with a line of two numbers, as in word2vec.

    Raises:
        InputError: The file is missing or broken, or a vector has another width; the message names file and line.
    """
    vectors: dict[str, Tensor] = {}
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                token, *values = line.rstrip("\r\n ").split(" ")
                if number == 1 and len(values) == 1 and token.isdecimal():
                    continue
                # Only the first vector of a token is used: some files have tokens with spaces, such as "at
                # NAME@DOMAIN" in glove.840B.
                if token in wanted and token not in vectors:
                    vectors[token] = _vector(values, width, f"{path}:{number}")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a file of vectors ({str(error)[:60]}); {_FORM}") from None
    return vectors


def _vector(values: list[str], width: int, where: str) -> Tensor:
    try:
        vector = np.asarray(values, dtype=np.float32)
    except ValueError:
        raise InputError(f"{where}: a value is not a number; {_FORM}") from None
    if vector.shape != (width,):
        raise InputError(
            f"{where}: a vector of {vector.size} values, but the embedding has {width}; make them equal "
            "(model.embedding, source_embedding, target_embedding)"
        )
    if not np.isfinite(vector).all():
        raise InputError(f"{where}: has values that are not finite")
    return torch.from_numpy(vector)
