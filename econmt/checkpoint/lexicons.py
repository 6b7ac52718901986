"""Reads and writes lexicons: tensor files with the translations of every source word."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from econmt.checkpoint.checkpoints import check_vocabulary
from econmt.checkpoint.tensor_files import FORMAT, read_tensors, write_tensors
from econmt.data.text.vocabulary import Vocabularies
from econmt.errors import InputError

_TABLE = "lexicon"


def write_lexicon(path: Path, table: Tensor, vocabulary: str) -> None:
    """Writes a table from :func:`econmt.data.text.lexicon.learn_lexicon`, with the vocabularies' fingerprint."""
    write_tensors(path, {_TABLE: table}, {"format": FORMAT, "vocabulary": vocabulary})


def read_lexicon(path: Path, vocabulary: str, vocabularies: Vocabularies) -> Tensor:
    """Reads the table of a lexicon for these vocabularies, (source vocabulary, K) int32."""
    tensors, metadata = read_tensors(path)
    if list(tensors) != [_TABLE]:
        raise InputError(f"{path}: not a lexicon; use a file written by econmt lexicon")
    check_vocabulary(metadata, vocabulary, path)
    table = tensors[_TABLE]
    valid = table.dtype == torch.int32 and table.dim() == 2 and len(table) == vocabularies.source.size
    if not valid or not ((table >= 0) & (table < vocabularies.target.size)).all():
        raise InputError(
            f"{path}: a damaged lexicon (shape {tuple(table.shape)}); create it again with econmt lexicon"
        )
    return table
