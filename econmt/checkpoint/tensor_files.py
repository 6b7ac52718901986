"""Text and tensor files, written atomically: after a crash a file is complete or absent.

A tensor file may hold matrices of 8 or 16 bits. An 8-bit matrix (N, K) is stored under its name, and the scales (N,)
float32 of its rows under its name and ``.steps``. A scale is the largest absolute value of the row divided by 127.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from econmt.config.json_reader import Record, parse_json
from econmt.config.migration import remove_keys
from econmt.config.yaml_reader import check_section
from econmt.data.files import refuse_pipe, whole_file
from econmt.errors import InputError
from econmt_ops.core.int8 import rounded

FORMAT = "econmt-1"
CHECKSUM = "checksum"
"""Metadata key of the SHA-256 checksum over the rest of the header and the data."""
_BLOCK = 1 << 20
_BROKEN = "the file is damaged; use another checkpoint"


class FileMetadata(Record):
    """Metadata of a tensor file, all text."""

    format: str
    checksum: str
    update: str = Field("0", pattern=r"^[0-9]{1,15}$")
    vocabulary: str = Field("", pattern=r"^[^\s]{0,200}$")
    optimizer: str = Field("", max_length=100)
    averaged: str = Field("", pattern=r"^[0-9]{0,15}( [0-9]{1,15})*$")
    quantized: str = Field("", pattern=r"^(int8|bfloat16)?$")


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a type as in options and columns, such as float32."""
    return str(dtype).removeprefix("torch.")


def write_text(path: Path, text: str) -> None:
    """Writes text in UTF-8 atomically, unless the file has the same content already."""
    content = text.encode("utf-8")
    if not (path.is_file() and path.read_bytes() == content):
        with whole_file(path) as file:
            file.write(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file with a checksum; the same tensors and metadata give the same bytes.

    The library's writer orders metadata differently in each run, so the header is written here (8 bytes of length,
    JSON, data: see the safetensors format); the library is used for reading.
    """
    header: dict[str, Any] = {"__metadata__": {key: metadata[key] for key in metadata if key != CHECKSUM}}
    # Widest types first keep every tensor aligned, as in the library's writer.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offset = 0
    for name in order:
        tensor, end = tensors[name], offset + tensors[name].nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    digest = _digest_of(header)
    with whole_file(path) as file, ThreadPoolExecutor(1) as beside:
        # The checksum precedes the data, so it is filled in after the data is written.
        file.write(_head(header, digest.hexdigest()))
        for name in order:
            values = tensors[name].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
            summed = beside.submit(digest.update, values)
            file.write(values)
            summed.result()  # so that only one tensor's copy is in memory
        file.seek(0)
        file.write(_head(header, digest.hexdigest()))


def _head(header: Mapping[str, Any], checksum: str) -> bytes:
    """Returns the beginning of a file, which includes the checksum."""
    metadata = {**header["__metadata__"], CHECKSUM: checksum}
    complete = {**header, "__metadata__": dict(sorted(metadata.items()))}
    head = json.dumps(complete, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def _digest_of(header: Mapping[str, Any]) -> Any:
    """Returns the digest of a header without checksum, to be updated with the data."""
    return hashlib.sha256(json.dumps(header, sort_keys=True, separators=(",", ":")).encode("utf-8"))


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of econmt's tensor file after all checks that need no tensor; see :func:`read_tensors`."""
    _check_beginning(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = dict(file.metadata() or {})
    except SafetensorError as error:
        raise InputError(
            f"{path}: truncated or broken safetensors file ({error}); use another checkpoint"
        ) from error
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{path}: not a file of econmt (format {metadata.get('format', 'none')}, expected {FORMAT}); use a file "
            "that econmt wrote"
        )
    check_section(FileMetadata, metadata, str(path), _BROKEN)
    return metadata


def known_metadata(path: Path) -> dict[str, str]:
    """Returns a tensor file's metadata, which includes its checksum; empty if it is not a sound file of econmt."""
    try:
        return read_metadata(path)
    except InputError:
        return {}


def check_tensors(path: Path) -> dict[str, str]:
    """Reads a file completely, block by block, to verify its checksum; returns its metadata."""
    metadata = read_metadata(path)
    try:
        with path.open("rb") as file:
            actual = _checksum(file)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); use another checkpoint") from error
    if actual != metadata[CHECKSUM]:
        raise InputError(f"{path}: damaged (its checksum is wrong); use another checkpoint")
    return metadata


def _checksum(file: IO[bytes]) -> str:
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    del header["__metadata__"][CHECKSUM]
    digest = _digest_of(header)
    while block := file.read(_BLOCK):
        digest.update(block)
    return str(digest.hexdigest())


def model_description(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Returns the model that a parameter file describes: its recipe section and vocabulary sizes; empty if missing."""
    described = parse_json(metadata["model"], f"{path}: model", _BROKEN) if "model" in metadata else {}
    remove_keys({"model": described})
    return described


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the CPU tensors and the metadata of a file from :func:`write_tensors`, without executing anything.

    Raises:
        InputError: The file is missing, a pickle, truncated, not from econmt, or has a wrong checksum.
    """
    metadata = check_tensors(path)
    with safe_open(path, framework="pt") as file:
        # The library maps the file into memory; a copy is aligned and independent of the file.
        return {name: file.get_tensor(name).clone() for name in file.keys()}, metadata  # noqa: SIM118


def _check_beginning(path: Path) -> None:
    refuse_pipe(path)
    try:
        with path.open("rb") as file:
            head = file.read(9)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); use a parameter file of econmt"
        ) from error
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{":
        if 8 + length > size:
            raise InputError(f"{path}: truncated safetensors file ({size} bytes); use another checkpoint")
        return
    if head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in b"\x01\x02\x03\x04\x05"):
        raise InputError(
            f"{path} is a pickle; econmt never loads pickles: use a .safetensors file that econmt wrote"
        )
    raise InputError(f"{path}: not a safetensors file; use a parameter file of econmt")


STEPS = ".steps"


def quantized(tensors: Mapping[str, Tensor], precision: torch.dtype, where: Path) -> dict[str, Tensor]:
    """Converts the finite matrices of a model to ``precision``, int8 or bfloat16; vectors are unchanged."""
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or tensor.dtype != torch.float32:
            converted[name] = tensor
        elif not tensor.isfinite().all():
            raise InputError(
                f"{where}: '{name}' holds values that are not finite; quantize another checkpoint"
            )
        elif precision == torch.int8:
            converted[name], converted[name + STEPS] = rounded(tensor)
        else:
            converted[name] = tensor.to(precision)
    return converted


def restored(tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Converts 8-bit matrices, which need a scale for each row, and 16-bit ones to float32; others are unchanged."""
    converted = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            steps = tensors.get(name + STEPS)
            if steps is None or steps.dtype != torch.float32 or steps.shape != tensor.shape[:1]:
                raise InputError(f"{where}: '{name}' has no scales for its rows; create the folder again")
            converted[name] = tensor.to(torch.float32) * steps[:, None]
        elif tensor.dtype == torch.bfloat16:
            converted[name] = tensor.to(torch.float32)
        else:
            matrix = tensors.get(name.removesuffix(STEPS), tensor)
            if matrix.dtype != torch.int8:  # else the tensor is the matrix's scales
                converted[name] = tensor
    return converted
