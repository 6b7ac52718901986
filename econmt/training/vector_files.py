"""Reads and writes files of word vectors: text of word2vec, GloVe and fastText, .npz and .safetensors."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from econmt.data.files import whole_file
from econmt.errors import InputError

_FORM = "use text (one token and its values per line), .npz or .safetensors with tokens and vectors"


def read_vectors(path: Path, wanted: Collection[str], width: int) -> dict[str, Tensor]:
    """Reads the vectors (width,) float32 of the ``wanted`` tokens in a file; the first one if a token is repeated.

    Text may begin with a line of two numbers, as in word2vec. ``.npz`` holds the arrays ``tokens`` (N,) of strings and
    ``vectors`` (N, width); ``.safetensors`` holds the tensor ``vectors``, and ``tokens`` in its metadata, as a JSON
    list.

    Raises:
        InputError: The file is missing or broken, or a vector has another width; the message names file and line.
    """
    rows = {".npz": _read_npz, ".safetensors": _read_safetensors}.get(path.suffix, _read_text)
    vectors: dict[str, Tensor] = {}
    try:
        for location, token, values in rows(path, wanted):
            # Only the first vector of a token is used: some files have tokens with spaces, such as "at NAME@DOMAIN" in
            # glove.840B.
            if token in wanted and token not in vectors:
                try:
                    vector = np.asarray(values, dtype=np.float32)
                except ValueError:
                    raise InputError(f"{location}: a value is not a number; {_FORM}") from None
                if vector.shape != (width,):
                    raise InputError(
                        f"{location}: a vector of {vector.size} values, but the embedding has {width}; make them equal "
                        "(model.embedding, source_embedding, target_embedding)"
                    )
                if not np.isfinite(vector).all():
                    raise InputError(f"{location}: has values that are not finite")
                vectors[token] = torch.from_numpy(vector.copy())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, SafetensorError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not a file of vectors ({str(error)[:60]}); {_FORM}") from None
    return vectors


_Rows = Iterator[tuple[str, str, object]]


def _read_text(path: Path, wanted: Collection[str]) -> _Rows:
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            token, *values = line.rstrip("\r\n ").split(" ")
            if number == 1 and len(values) == 1 and token.isdecimal():
                continue
            if token in wanted:
                yield f"{path}:{number}", token, values


def _read_npz(path: Path, wanted: Collection[str]) -> _Rows:
    with np.load(path, allow_pickle=False) as file:
        yield from _paired(path, [str(token) for token in file["tokens"]], file["vectors"], wanted)


def _read_safetensors(path: Path, wanted: Collection[str]) -> _Rows:
    with safe_open(path, framework="np") as file:
        tokens = json.loads((file.metadata() or {})["tokens"])
        yield from _paired(path, [str(token) for token in tokens], file.get_tensor("vectors"), wanted)


def _paired(path: Path, tokens: Sequence[str], vectors: np.ndarray, wanted: Collection[str]) -> _Rows:
    if vectors.ndim != 2 or len(tokens) != len(vectors):
        raise InputError(
            f"{path}: {len(tokens)} tokens, but vectors of shape {vectors.shape}; there must be one row per token"
        )
    for token, vector in zip(tokens, vectors, strict=True):
        if token in wanted:
            yield f"{path}: {token}", token, vector


def write_vectors(path: Path, tokens: Sequence[str], vectors: Tensor) -> None:
    """Writes vectors (N, E) of N tokens in a format that :func:`read_vectors` reads, determined by the suffix."""
    values = vectors.detach().to(torch.float32).cpu().numpy()
    if path.suffix == ".npz":
        with io.BytesIO() as buffer:
            np.savez(buffer, tokens=np.asarray(tokens), vectors=values)
            content = buffer.getvalue()
    elif path.suffix == ".safetensors":
        content = save({"vectors": values}, metadata={"tokens": json.dumps(list(tokens), ensure_ascii=False)})
    else:
        lines = [f"{len(tokens)} {values.shape[1]}\n"]
        lines += [
            f"{token} {' '.join(map(repr, row))}\n"
            for token, row in zip(tokens, values.tolist(), strict=True)
        ]
        content = "".join(lines).encode()
    with whole_file(path) as file:
        file.write(content)
