"""Parallel text in Parquet files, as in Hugging Face data sets, read with pyarrow (the extra ``parquet``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from econmt.data.files import refuse_pipe
from econmt.errors import InputError

_ROWS = 1024
"""Number of rows read at once."""


def shards(base: Path) -> list[Path]:
    """Returns PREFIX.parquet, or else the shards PREFIX-*.parquet in order; empty if there are none."""
    single_file = base.with_name(base.name + ".parquet")
    if single_file.is_file():
        return [single_file]
    if not base.parent.is_dir():
        return []
    shard_prefix = f"{base.name}-"
    return sorted(path for path in base.parent.glob("*.parquet") if path.name.startswith(shard_prefix))


def read_parquet(path: Path, source: str, target: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs of a Parquet file; line breaks in a text become spaces, null becomes an empty text.

    Args:
        path: the file.
        source, target: names of the columns, or of the fields of a column ``translation``.

    Raises:
        InputError: if pyarrow is not installed, the file cannot be read, or it lacks these columns.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise InputError(
            f"{path}: reading Parquet files needs pyarrow, which is not installed; run pip install pyarrow"
        ) from None
    refuse_pipe(path)
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = _columns(path, file.schema_arrow, source, target)
            for batch in file.iter_batches(_ROWS, columns=list(dict.fromkeys(names))):
                sides = _texts(batch, names[0], source), _texts(batch, names[1], target)
                for pair in zip(*sides, strict=True):
                    row += 1
                    yield _line(pair[0], path, row), _line(pair[1], path, row)
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: names that are not UTF-8
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not a Parquet file, or damaged after row {row}: {reason}") from error
    if not row:
        raise InputError(f"{path}: the file has no rows")


def _columns(path: Path, schema: Any, source: str, target: str) -> tuple[str, str]:
    """Returns the columns of both sides: two text columns, or ``translation`` twice."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        return bool(types.is_string(kind) or types.is_large_string(kind))

    fields = {field.name: field.type for field in schema}
    nested = fields.get("translation")
    if nested is not None and types.is_struct(nested):
        inner = {field.name: field.type for field in nested}
        if all(side in inner and is_text(inner[side]) for side in (source, target)):
            return "translation", "translation"
        fields |= {f"translation.{name}": kind for name, kind in inner.items()}
    if {source, target} <= set(fields) and is_text(fields[source]) and is_text(fields[target]):
        return source, target
    raise InputError(
        f"{path}: no text columns {source} and {target}, nor translation.{source} and translation.{target}; it has "
        f"{', '.join(f'{name} ({kind})' for name, kind in fields.items() if name != 'translation') or 'none'}"
    )


def _texts(batch: Any, column: str, side: str) -> list[str | None]:
    values = batch.column(column)
    if column == "translation":
        return [None if row is None else row[side] for row in values.to_pylist()]
    return list(values.to_pylist())


def _line(text: str | None, path: Path, row: int) -> str:
    if text is None:
        return ""
    if "\0" in text:
        raise InputError(f"{path}:{row}: NUL byte at column {text.index(chr(0)) + 1}; is this text?")
    return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
