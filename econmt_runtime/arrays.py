"""Arrays from a safetensors file, and products with them.

K inputs, N outputs, R rows.
"""

from __future__ import annotations

import hashlib
import json
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

_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I8": np.dtype("i1"), "I32": np.dtype("<i4")}
_HEADER, _BLOCK = 1 << 26, 1 << 20

_LINE = 64
LANES, GROUP, FILLED = 16, 4, 64
"""Outputs and inputs of a group as the C library reads it, and of what multiple of inputs it has zeros."""


def read_arrays(path: Path, wanted: str | None = None) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file, mapped into memory, after its checksum was compared. Nothing is executed.

    ``wanted`` is the checksum that it must have; None: its own.

    Raises:
        RuntimeInputError: it is absent, or no such file, or cut off, or damaged.
    """
    with open_regular(path) as file:
        return _read_arrays(path, file, wanted)


def _read_arrays(path: Path, file: IO[bytes], wanted: str | None) -> dict[str, npt.NDArray[Any]]:
    try:
        content = np.memmap(file, np.uint8, "r")
        length = int.from_bytes(content[:8].tobytes(), "little")
        if length > min(_HEADER, len(content) - 8):
            raise ValueError("truncated")
        header = json.loads(content[8 : 8 + length].tobytes())
        _check_sum(file, length, header, wanted)
        data, found = content[8 + length :], {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            kind, shape = _TYPES[entry["dtype"]], entry["shape"]
            if not 0 <= begin <= end <= len(data):
                raise ValueError(f"{name} is cut off")
            if (length + begin) % kind.itemsize:
                raise ValueError(f"{name} is not aligned")
            found[name] = np.asarray(data[begin:end]).view(kind).reshape(shape)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RuntimeInputError(
            f"{path}: not what econmt export --runtime writes ({error}); export it again"
        ) from error
    return found


def _check_sum(file: IO[bytes], length: int, header: dict[str, Any], wanted: str | None) -> None:
    """Raises ValueError if the header and what follows it have another SHA-256 than ``__metadata__`` or ``wanted``."""
    metadata = dict(header["__metadata__"])
    own = metadata.pop("checksum")
    if wanted not in (None, own):
        raise ValueError("its checksum is another one")
    rest = json.dumps({**header, "__metadata__": metadata}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(rest.encode("utf-8"))
    file.seek(8 + length)  # not by the map: what is only read once need not stay in memory
    while block := file.read(_BLOCK):
        digest.update(block)
    if digest.hexdigest() != own:
        raise ValueError("its checksum is another one")


class RuntimeProduct:
    """left weight^T + bias: in float32 by numpy, in 8 bits by the C library.

    Args:
        weight: (N, K) float32, or groups (N / 16, K / 4, 16, 4) int8, with the ``steps`` (N,) of its rows and the
            ``sums`` of their values. bias: (N,), or None.
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

    @classmethod
    def named(cls, arrays: Arrays, name: str) -> RuntimeProduct:
        """That of the arrays that begin with a name."""
        more = (arrays.get(f"{name}.{part}") for part in ("bias", "steps", "sums"))
        return cls(arrays[f"{name}.weight"], *more)

    def __call__(self, left: Floats, start: Floats | None = None) -> Floats:
        """The product of left (R, K), plus ``start`` (R, N), which may be overwritten."""
        if self._steps is not None and self._sums is not None:
            return library.int8_product(left, self._weight, self._sums, self._steps, self.bias, start)
        made: Floats = left @ self._weight
        for more in (self.bias, start):
            if more is not None:
                made += more
        return made


def _aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that begins with a line of the cache, in which tiles are loaded."""
    room = np.empty(array.nbytes + _LINE, np.int8)
    begin = -room.ctypes.data % _LINE
    made = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def _in_groups(weight: npt.NDArray[np.int8]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """A weight (N, K) as the library reads it, and the sum of each output's values."""
    outputs, inputs = weight.shape
    filled = np.zeros((outputs + -outputs % LANES, inputs + -inputs % FILLED), np.int8)
    filled[:outputs, :inputs] = weight
    groups = filled.reshape(-1, LANES, filled.shape[1] // GROUP, GROUP).transpose(0, 2, 1, 3)
    return groups, filled.sum(1, dtype=np.int32)


class Table:
    """The vectors of words, and the output layer that has the same matrix or another.

    Args:
        weight: (V, K) float32, or int8 with the ``steps`` (V,) of its rows.
    """

    def __init__(self, weight: npt.NDArray[Any], steps: Floats | None) -> None:
        self._weight, self._steps = weight, steps

    @classmethod
    def named(cls, arrays: Arrays, name: str) -> Table:
        """That of the arrays that begin with a name."""
        return cls(arrays[f"{name}.weight"], arrays.get(f"{name}.steps"))

    def __getitem__(self, words: Ids) -> Floats:
        """The vectors (R, K) of words (R,)."""
        found = self._weight[words]
        return found if self._steps is None else found * self._steps[words][:, None]

    def product(self, bias: Floats, words: Ids | None) -> RuntimeProduct:
        """The product with the rows of some words, or of all."""
        chosen = slice(None) if words is None else words
        if self._steps is None:
            return RuntimeProduct(self._weight[chosen], bias[chosen])
        groups, sums = _in_groups(self._weight[chosen])
        return RuntimeProduct(groups, bias[chosen], self._steps[chosen], sums)
