"""Files that are whole or absent, whatever the moment at which the process dies; tensors in files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from econmt.data.files import whole_file
from econmt.errors import InputError

FORMAT = "econmt-1"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_text(path: Path, text: str) -> None:
    """Writes text in UTF-8, whole or not at all, unless the file says just that already."""
    content = text.encode("utf-8")
    if not (path.is_file() and path.read_bytes() == content):
        with whole_file(path) as file:
            file.write(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file; the same tensors and metadata give the same bytes.

    The library's own writer puts the metadata in an order that changes from run to run; so the header is made here
    (8 bytes of length, JSON, data: see the safetensors format), and reading is left to the library.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    # Widest types first keep every tensor aligned, as in the library's writer.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offset = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    head += b" " * (-len(head) % 8)
    with whole_file(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            values = tensors[name].detach().to("cpu").contiguous().reshape(-1)
            file.write(values.view(torch.uint8).numpy().data)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a tensor file of econmt, after every check that needs no tensor; see :func:`read_tensors`."""
    _check_beginning(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = dict(file.metadata() or {})
    except SafetensorError as error:
        raise InputError(
            f"{path}: truncated or broken safetensors file ({error}); use another checkpoint"
        ) from error
    if metadata.get("format") != FORMAT:
        found = metadata.get("format", "none")
        raise InputError(
            f"{path}: not a file of econmt (format {found}, wanted {FORMAT}); give a file that econmt wrote"
        )
    return metadata


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, on the CPU, and the metadata of a file that :func:`write_tensors` wrote. Nothing is executed.

    Raises:
        InputError: naming the file, if it is absent, a pickle, truncated, or not of econmt.
    """
    metadata = read_metadata(path)
    with safe_open(path, framework="pt") as file:
        # The library maps the file; a copy is aligned and outlives it.
        return {name: file.get_tensor(name).clone() for name in file.keys()}, metadata  # noqa: SIM118


def _check_beginning(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(9)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); give a parameter file of econmt"
        ) from error
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{":
        if 8 + length > size:
            raise InputError(f"{path}: truncated safetensors file ({size} bytes); use another checkpoint")
        return
    if head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in b"\x01\x02\x03\x04\x05"):
        raise InputError(
            f"{path} is a pickle; econmt never loads pickles: give a .safetensors file that econmt wrote"
        )
    raise InputError(f"{path}: not a safetensors file; give a parameter file of econmt")
