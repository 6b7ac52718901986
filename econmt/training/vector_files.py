"""Files of word vectors: text as word2vec, GloVe and fastText write it, .npz and .safetensors."""

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

_FORM = "give text (a token and its values a line), .npz or .safetensors with tokens and vectors"


def read_vectors(path: Path, wanted: Collection[str], width: int) -> dict[str, Tensor]:
    """The vectors (width,) in float32 of those of the ``wanted`` tokens that a file has, the first of each.

    Text may begin with a line of two numbers, as that of word2vec. ``.npz`` has the arrays ``tokens`` (N,) of words
    and ``vectors`` (N, width); ``.safetensors`` the tensor ``vectors``, and ``tokens`` in its metadata, a JSON list.

    Raises:
        InputError: naming the file, and the line if it is text: there is none, it is broken, or vectors are of another
            width.
    """
    rows = {".npz": _of_npz, ".safetensors": _of_safetensors}.get(path.suffix, _of_text)
    found: dict[str, Tensor] = {}
    try:
        for place, token, values in rows(path, wanted):
            # Only the first of a token is read: some files have tokens with blanks, as glove.840B "at NAME@DOMAIN".
            if token in wanted and token not in found:
                try:
                    vector = np.asarray(values, dtype=np.float32)
                except ValueError:
                    raise InputError(f"{place}: a value is no number; {_FORM}") from None
                if vector.shape != (width,):
                    raise InputError(
                        f"{place}: a vector of {vector.size} values; model.embedding is {width}: make them equal"
                    )
                if not np.isfinite(vector).all():
                    raise InputError(f"{place}: has values that are not finite numbers")
                found[token] = torch.from_numpy(vector.copy())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, SafetensorError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: no file of vectors ({str(error)[:60]}); {_FORM}") from None
    return found


_Rows = Iterator[tuple[str, str, object]]


def _of_text(path: Path, wanted: Collection[str]) -> _Rows:
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            token, *values = line.rstrip("\r\n ").split(" ")
            if number == 1 and len(values) == 1 and token.isdecimal():
                continue
            if token in wanted:
                yield f"{path}:{number}", token, values


def _of_npz(path: Path, wanted: Collection[str]) -> _Rows:
    with np.load(path, allow_pickle=False) as file:
        yield from _paired(path, [str(token) for token in file["tokens"]], file["vectors"], wanted)


def _of_safetensors(path: Path, wanted: Collection[str]) -> _Rows:
    with safe_open(path, framework="np") as file:
        tokens = json.loads((file.metadata() or {})["tokens"])
        yield from _paired(path, [str(token) for token in tokens], file.get_tensor("vectors"), wanted)


def _paired(path: Path, tokens: Sequence[str], vectors: np.ndarray, wanted: Collection[str]) -> _Rows:
    if vectors.ndim != 2 or len(tokens) != len(vectors):
        raise InputError(
            f"{path}: {len(tokens)} tokens and vectors of shape {vectors.shape}: one row a token"
        )
    for token, vector in zip(tokens, vectors, strict=True):
        if token in wanted:
            yield f"{path}: {token}", token, vector


def write_vectors(path: Path, tokens: Sequence[str], vectors: Tensor) -> None:
    """Writes vectors (N, E) of N tokens, as :func:`read_vectors` reads them; the suffix says how."""
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
