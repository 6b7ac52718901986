"""Reading of safetensors files, and matrix products with their arrays.

K inputs, N outputs, R rows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from econmt_runtime import library
from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.files import open_regular
from econmt_runtime.library import Floats, Ids

Arrays = Mapping[str, npt.NDArray[Any]]

_TYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind) for name, kind in (("F32", "<f4"), ("I8", "i1"), ("I16", "<i2"), ("I32", "<i4"))
}
_HEADER, _BLOCK = 1 << 26, 1 << 20

_LINE = 64
LANES, GROUP, FILLED = 16, 4, 64
"""Outputs and inputs per group in the C library's layout, and the multiple to which inputs are padded with zeros."""


def read_arrays(path: Path, expected: str | None = None) -> dict[str, npt.NDArray[Any]]:
    """Maps the arrays of a file into memory after verifying its checksum; nothing in the file is executed.

    Args:
        path: Path of the safetensors file.
        expected: Checksum of the file; None to verify only the checksum in the file.

    Raises:
        RuntimeInputError: If the file is absent, truncated, damaged or of another format.
    """
    with open_regular(path) as file:
        return _read_arrays(path, file, expected)


def _read_arrays(path: Path, file: IO[bytes], expected: str | None) -> dict[str, npt.NDArray[Any]]:
    try:
        # Windows deletes no mapped file, such as that of an unpacked archive.
        content = np.fromfile(file, np.uint8) if os.name == "nt" else np.memmap(file, np.uint8, "r")
        length = int.from_bytes(content[:8].tobytes(), "little")
        if length > min(_HEADER, len(content) - 8):
            raise ValueError("truncated")
        header = json.loads(content[8 : 8 + length].tobytes())
        _check_sum(file, length, header, expected)
        data, arrays = content[8 + length :], {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            kind, shape = _TYPES[entry["dtype"]], entry["shape"]
            if not 0 <= begin <= end <= len(data):
                raise ValueError(f"{name} is cut off")
            if (length + begin) % kind.itemsize:
                raise ValueError(f"{name} is not aligned")
            arrays[name] = np.asarray(data[begin:end]).view(kind).reshape(shape)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RuntimeInputError(
            f"{path}: not a file written by econmt export --runtime ({error}); export the model again"
        ) from error
    return arrays


def _check_sum(file: IO[bytes], length: int, header: dict[str, Any], expected: str | None) -> None:
    """Raises ValueError if the SHA-256 of header and data is not that of ``__metadata__`` and ``expected``."""
    metadata = dict(header["__metadata__"])
    stored = metadata.pop("checksum")
    if expected not in (None, stored):
        raise ValueError("its checksum differs from that in model.json")
    rest = json.dumps({**header, "__metadata__": metadata}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(rest.encode("utf-8"))
    file.seek(8 + length)  # not through the memory map, whose pages would stay in memory
    while block := file.read(_BLOCK):
        digest.update(block)
    if digest.hexdigest() != stored:
        raise ValueError("its checksum does not match")


class RuntimeProduct:
    """Product left weight^T + bias: in float32 by numpy, in 8 bits by the C library.

    Args:
        weight: (N, K) float32, or int8 in groups (N / 16, K / 4, 16, 4).
        bias: (N,), or None.
        steps: Scales (N,) of the rows of an int8 weight.
        sums: Sums of the rows of an int8 weight.
    """

    def __init__(
        self,
        weight: npt.NDArray[Any],
        bias: Floats | None,
        steps: Floats | None = None,
        sums: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.bias, self.outputs = bias, len(weight) if steps is None else len(steps)
        self._steps, self._sums = steps, sums
        self._weight = weight.T if steps is None else _aligned(weight)
        self._grouped: npt.NDArray[Any] | None = None

    @classmethod
    def named(cls, arrays: Arrays, name: str) -> RuntimeProduct:
        """Creates the product of the arrays whose names begin with ``name``."""
        more = (arrays.get(f"{name}.{part}") for part in ("bias", "steps", "sums"))
        return cls(arrays[f"{name}.weight"], *more)

    def structure(self, inputs: int) -> Any:
        """Returns the weight, of K inputs, for kernels that compute more than one product."""
        values = self._weight
        if self._steps is None:
            if self._grouped is None:
                self._grouped = _aligned(_in_groups(self._weight.T, 1))
            values = self._grouped
        return library.weight_structure(inputs, self.outputs, values, self.bias, self._steps, self._sums)

    def __call__(self, left: Floats) -> Floats:
        """Returns the product of left (R, K)."""
        if self._steps is not None and self._sums is not None:
            return library.int8_product(left, self._weight, self._sums, self._steps, self.bias)
        product: Floats = left @ self._weight
        if self.bias is not None:
            product += self.bias
        return product


def _aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a copy that is aligned to cache lines, as the C library's tiles require."""
    buffer = np.empty(array.nbytes + _LINE, np.int8)
    begin = -buffer.ctypes.data % _LINE
    copy = buffer[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _in_groups(weight: npt.NDArray[Any], multiple: int) -> npt.NDArray[np.int32]:
    """Returns a weight (N, K) in the C library's layout (N / 16, K / n, 16), with n inputs in four bytes.

    The weight is filled with zeros to a multiple of 16 outputs and of ``multiple`` inputs.
    """
    outputs, inputs = weight.shape
    filled = np.zeros((outputs + -outputs % LANES, inputs + -inputs % multiple), weight.dtype)
    filled[:outputs, :inputs] = weight
    fours = filled.view(np.int32)
    return fours.reshape(-1, LANES, fours.shape[1]).swapaxes(1, 2)


class Table:
    """Word embeddings, and the output layer with the same or another matrix.

    Args:
        weight: (V, K) float32, or int8.
        steps: Scales (V,) of the rows of an int8 weight, or None.
    """

    def __init__(self, weight: npt.NDArray[Any], steps: Floats | None) -> None:
        self._weight, self._steps = weight, steps

    @classmethod
    def named(cls, arrays: Arrays, name: str) -> Table:
        """Creates the table of the arrays whose names begin with ``name``."""
        return cls(arrays[f"{name}.weight"], arrays.get(f"{name}.steps"))

    def __getitem__(self, words: Ids) -> Floats:
        """Returns the embeddings (R, K) of words (R,)."""
        embeddings = self._weight[words]
        return embeddings if self._steps is None else embeddings * self._steps[words][:, None]

    @property
    def width(self) -> int:
        """K."""
        return int(self._weight.shape[1])

    def rows(self) -> dict[str, Any]:
        """Returns the table by its names in a search of the library."""
        name = "embedding" if self._steps is None else "bytes"
        return {"embedded": self.width, name: self._weight, "scales": self._steps}

    def product(self, bias: Floats, words: Ids | None) -> RuntimeProduct:
        """Returns the product with the rows of the given words, or of all words."""
        chosen = slice(None) if words is None else words
        if self._steps is None:
            return RuntimeProduct(self._weight[chosen], bias[chosen])
        weight = self._weight[chosen]
        sums = np.zeros(len(weight) + -len(weight) % LANES, np.int32)
        weight.sum(1, out=sums[: len(weight)])
        return RuntimeProduct(_in_groups(weight, FILLED), bias[chosen], self._steps[chosen], sums)

    def structure(self, bias: Floats, words: Ids) -> Any:
        """Returns the weight of the product with the rows of the given words, for `library.products_by_owner`."""
        return self.product(bias, words).structure(self.width)
