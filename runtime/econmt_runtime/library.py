"""Bindings to the C library, with the kernels that beam search needs, for numpy arrays.

kernels.h of econmt_ops describes every argument. R rows, K inputs, N outputs, S source positions.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from econmt_runtime.errors import RuntimeInputError

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

VERSION = 11
"""Version of the C interface, which equals econmt_version in kernels.c."""

MOST_WORDS = 64
"""Largest number of words that `best_words` returns per row."""

STRUCTURES = {
    "product_int8": "rows inputs outputs *left left_stride *weight *sums *scales *bias *start start_stride *output "
    "output_stride",
    "products_by_owner": "rows most *left left_stride *weights *owners *output output_stride",
    "layer_sequence": "rows positions hidden cell backwards *recurrent *vectors *table *places *lengths *outputs "
    "outputs_stride *last last_stride",
    "best_words": "rows vocabulary count *logits logits_stride *barred *owners *skipped *values *words *end",
    "search_step": "rows *search *owners *tokens *h *c *output *coverage *seen *log_probs",
    "beam_search": "sentences positions beam steps nbest layers size compared summed cell fed residual contexts asked "
    "embedded watched coverage width *weights *vectors *embedding *bytes *scales *shares *known *ids *barred *keys "
    "*score *gain *shift *coverage_key *coverage_shares *coverage_attention *coverage_recurrent *values *context_bias "
    "*output_gain *output_shift *padding *first *limits *penalties *watch *stopped *ended *count *grown *seen",
}
"""Fields of each kernel's argument structure, in order: sizes, and pointers with a star."""

_WEIGHT = "kind inputs outputs *values *sums *scales *bias"
"""Fields of a weight, to which "recurrent" points."""

_HERE = f"{platform.system()}-{platform.machine()}".lower()
"""Name of this system and processor, such as linux-x86_64."""

_functions: dict[str, tuple[Any, Any]] = {}


def library_file(package: Path | None = None) -> Path | None:
    """Returns the library's path in this package or in econmt_ops, without importing it; None if missing.

    Args:
        package: Folder to which this package was unpacked; None if it was not.
    """
    folders, spec = [package or Path(__file__).parent], importlib.util.find_spec("econmt_ops")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "backends" / "c")
    paths = (folder / f"_kernels.{_HERE}.so" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def start(package: Path | None = None) -> None:
    """Loads the library; see :func:`library_file`.

    Raises:
        RuntimeInputError: If the library is missing, of another version, or built for another machine.
    """
    if _functions:
        return
    if np.dtype(int).itemsize < 8:
        raise RuntimeInputError("numpy has whole numbers of 32 bits here; install numpy 2 or newer")
    path = library_file(package)
    if path is None:
        raise RuntimeInputError(
            f"the C library _kernels.{_HERE}.so is missing; export the model again with --platforms {_HERE}, or "
            "install gcc, then econmt-runtime again from a checkout"
        )
    try:
        library: Any = ctypes.CDLL(str(path))
        library.econmt_size.argtypes, library.econmt_size.restype = [ctypes.c_char_p], ctypes.c_int64
        structures = {name: _structure(name, fields) for name, fields in STRUCTURES.items()}
        fits = library.econmt_version() == VERSION and all(
            library.econmt_size(name.encode()) == ctypes.sizeof(kind) for name, kind in structures.items()
        )
    except (OSError, AttributeError) as error:
        raise RuntimeInputError(
            f"{path}: cannot be loaded here ({error}); export the model on this machine"
        ) from error
    if not fits:
        raise RuntimeInputError(f"{path}: built from another version of econmt; export the model again")
    if sys.platform == "win32":
        atexit.register(ctypes.windll.kernel32.FreeLibrary, ctypes.c_void_p(library._handle))
    library.econmt_start.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int]
    library.econmt_start(None, None, None, 3)
    for name, kind in structures.items():
        function = getattr(library, f"econmt_{name}")
        function.argtypes = [ctypes.POINTER(kind), ctypes.c_int64]
        _functions[name] = function, kind


def _structure(name: str, fields: str) -> Any:
    kinds = [
        (field.lstrip("*"), ctypes.c_void_p if field.startswith("*") else ctypes.c_int64)
        for field in fields.split()
    ]
    return type(name, (ctypes.Structure,), {"_fields_": kinds})


def _call(name: str, *values: Any) -> None:
    """Calls a kernel with the fields of its structure; an array is passed as its pointer, None as a null pointer."""
    function, kind = _functions[name]
    arguments = kind(*(value.ctypes.data if isinstance(value, np.ndarray) else value for value in values))
    if function(arguments, 1):
        raise MemoryError(f"no memory for the scratch space of {name}")


def _row(array: npt.NDArray[Any]) -> int:
    """Returns the number of elements from one row to the next; the values of a row are contiguous."""
    return array.strides[0] // array.itemsize


def _rows(array: Floats) -> Floats:
    """Returns an array with contiguous rows."""
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


_Weight = _structure("weight", _WEIGHT)


def weight_structure(
    inputs: int,
    outputs: int,
    values: npt.NDArray[Any],
    bias: Floats | None,
    steps: Floats | None,
    sums: npt.NDArray[np.int32] | None,
) -> Any:
    """Returns the structure of a weight (N, K) in the library's layout, float32 or int8."""
    arrays = values, sums, steps, bias
    addresses = (None if each is None else each.ctypes.data for each in arrays)
    structure = _Weight(0 if steps is None else 2, inputs, outputs, *addresses)
    structure.arrays = arrays  # which it must not outlive
    return structure


def layer_sequence(
    cell: int,
    recurrent: Any,
    vectors: Floats | None,
    table: Floats,
    places: Ids,
    lengths: Ids,
    outputs: Floats,
    last: Floats,
    *,
    backwards: bool,
) -> None:
    """Runs all steps of an encoder layer in one direction.

    Args:
        cell: Number of the cell in kernels.h.
        recurrent: Result of `weight_structure`, or None for a cell without such a product.
        vectors: Vectors of the cell's layer normalization, or None.
        table: (M, G H), the inputs' share of the gates. places: (T, B), row of the table for each position.
        lengths: (B,), at least 1.
        outputs: (T, B, H), written at a sentence's own positions; may be columns of a wider array.
        last: (B, H), receives h after the last step; likewise.
        backwards: True to run from a sentence's last position to its first.
    """
    positions, rows, hidden = outputs.shape
    pointer = None if recurrent is None else ctypes.addressof(recurrent)
    _call(
        "layer_sequence",
        rows, positions, hidden, cell, int(backwards), pointer, vectors, table, places, lengths,
        outputs, outputs.strides[1] // outputs.itemsize, last, _row(last),
    )  # fmt: skip


def search_structure(**given: Any) -> Any:
    """Returns the structure of a beam search, for `search_step`: sizes, arrays, and the result of `weight_array`."""
    values = {
        name: value.ctypes.data if isinstance(value, np.ndarray) else value for name, value in given.items()
    }
    structure = _functions["beam_search"][1](
        **{**values, "weights": ctypes.addressof(given["weights"]), "beam": 1, "nbest": 1}
    )
    structure.given = given  # which it must not outlive
    return structure


def search_step(search: Any, owners: Ids, tokens: Ids, state: Sequence[Floats]) -> None:
    """Runs one step of the decoder.

    Args:
        search: Result of `search_structure`.
        owners: Sentence of each row, (R,). tokens: Its last word, (R,).
        state: Contiguous arrays h and c (layers, R, H), o (R, H) and coverage (R, S, W), which are overwritten.
    """
    owners, tokens = np.ascontiguousarray(owners), np.ascontiguousarray(tokens)
    seen = np.empty((len(tokens), search.positions), np.float32)
    _call("search_step", len(tokens), ctypes.addressof(search), owners, tokens, *state, seen, None)


def int8_product(
    left: Floats,
    weight: npt.NDArray[np.int8],
    sums: npt.NDArray[np.int32],
    steps: Floats,
    bias: Floats | None,
) -> Floats:
    """Computes left (R, K) times an 8-bit weight in the library's layout, plus bias (N,)."""
    left = _rows(left)
    steps, bias = np.ascontiguousarray(steps), None if bias is None else np.ascontiguousarray(bias)
    output = np.empty((len(left), len(steps)), np.float32)
    _call(
        "product_int8",
        *left.shape, len(steps), left, _row(left), weight, sums, steps, bias, None, 0, output, _row(output),
    )  # fmt: skip
    return output


def weight_array(weights: Sequence[Any]) -> Any:
    """Returns an array of results of `weight_structure`; None is a missing one."""
    array = (_Weight * len(weights))(*(_Weight() if weight is None else weight for weight in weights))
    array.weights = weights  # which it must not outlive
    return array


def products_by_owner(weights: Any, most: int, left: Floats, owners: Ids) -> Floats:
    """Computes left (R, K) times the weights of the rows' sentences, plus their biases.

    Args:
        weights: Result of `weight_array`, a weight (., K) per sentence.
        most: N, at least the outputs of each weight.
        left: (R, K).
        owners: Sentence of each row, (R,), ascending.

    Returns:
        Products (R, N), -inf beyond the outputs of a row's weight.
    """
    left, owners = _rows(left), np.ascontiguousarray(owners)
    output = np.empty((len(left), most), np.float32)
    _call(
        "products_by_owner",
        len(left), most, left, _row(left), ctypes.addressof(weights), owners, output, _row(output),
    )  # fmt: skip
    return output


def best_words(logits: Floats, count: int, skipped: Ids) -> tuple[Floats, Ids, Floats]:
    """Returns the ``count`` most probable words of each row.

    Args:
        logits: (R, V).
        count: Number of words per row.
        skipped: Two words that are never returned, (2,).

    Returns:
        Log-probabilities (R, count) in descending order, their words, and the log-probability (R,) of word 3 (EOS).
    """
    logits = _rows(logits)
    rows, vocabulary = logits.shape
    values, words = np.full((rows, count), -np.inf, np.float32), np.zeros((rows, count), np.int64)
    end = np.empty(rows, np.float32)
    _call(
        "best_words",
        rows, vocabulary, count, logits, _row(logits), None, None, skipped, values, words, end,
    )  # fmt: skip
    return values, words, end
