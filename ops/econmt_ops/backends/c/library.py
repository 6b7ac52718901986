"""Loader of the C library, and its structures, which mirror kernels.h, where every argument is described."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

_VERSION = 4
"""Version that econmt_version in kernels.c returns."""

_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """Returns a structure of sizes (``name``) and pointers (``*name``), in this order."""
    kinds = [(field.lstrip("*"), _POINTER if field.startswith("*") else _SIZE) for field in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": kinds})


LSTMForward = _structure(
    "lstm_forward",
    "rows hidden narrow *gates gates_stride *recurrent recurrent_stride *before before_stride *h h_stride *after "
    "after_stride *kept kept_stride",
)
LSTMBackward = _structure(
    "lstm_backward",
    "rows hidden narrow sums *gates gates_stride *before *after before_stride after_stride *incoming *dh "
    "incoming_stride dh_stride *dc dc_stride *dgates dgates_stride *dbefore dbefore_stride",
)
AttentionForward = _structure(
    "attention_forward",
    "rows positions size narrow *query query_stride *keys *score *padding *weights *owners",
)
CombineForward = _structure(
    "combine_forward",
    "rows positions size narrow *share share_stride *attention attention_stride *projected *output output_stride "
    "*owners plain",
)
ProductInt8 = _structure(
    "product_int8",
    "rows inputs outputs *left left_stride *weight *sums *scales *bias *start start_stride *output output_stride",
)
BestWords = _structure(
    "best_words",
    "rows vocabulary count *logits logits_stride *barred *owners *skipped *values *words *end",
)
Weight = _structure("weight", "kind inputs outputs *values *sums *scales *bias")
LSTMSequence = _structure(
    "lstm_sequence",
    "rows positions hidden backwards *recurrent *table *places *lengths *outputs outputs_stride *last last_stride",
)
BeamSearch = _structure(
    "beam_search",
    "sentences positions beam steps nbest layers size compared summed fed residual contexts asked embedded watched "
    "*weights *embedding *bytes *scales *shares *known *ids *barred *keys *score *values *padding *first *limits "
    "*penalties *watch *stopped *ended *count *grown *seen",
)
SearchStep = _structure("search_step", "rows *search *owners *tokens *h *c *output *seen *log_probs")
AttentionBackward = _structure(
    "attention_backward",
    "rows positions size narrow *query query_stride *keys *score *padding *weights *dweights *dkeys *dscore *dquery "
    "dquery_stride",
)
WeightGradient = _structure(
    "weight_gradient",
    "rows positions size narrow *values batch_stride position_stride *dcontext dcontext_stride *incoming "
    "incoming_stride *padding *dweights",
)
RecurrenceForward = _structure(
    "recurrence_forward",
    "rows positions hidden narrow width backwards *decay decay_batch decay_step *inputs inputs_batch inputs_step "
    "*initial *lengths *outputs outputs_batch outputs_step block *carries *last",
)
RecurrenceBackward = _structure(
    "recurrence_backward",
    "rows positions hidden narrow width backwards *decay decay_batch decay_step *kept kept_batch kept_step *doutputs "
    "doutputs_batch doutputs_step *initial *lengths block *carries *after *ddecay *dinputs gradients_batch "
    "gradients_step *dinitial",
)
RecurrenceSummary = _structure(
    "recurrence_summary",
    "rows positions hidden narrow width backwards gradient *decay *inputs decay_batch decay_step inputs_batch "
    "inputs_step *products *ends",
)
_SCAN_CELL = "narrow parts gates recurrence output squashes rows positions hidden width *products *read "
ScanCellForward = _structure(
    "scan_cell_forward",
    _SCAN_CELL
    + "read_batch read_step *initial *lengths *outputs outputs_batch outputs_step *cells cells_batch "
    "cells_step *last",
)
ScanCellBackward = _structure(
    "scan_cell_backward",
    _SCAN_CELL
    + "read_batch read_step *initial initial_stride *lengths *cells cells_batch cells_step *doutputs "
    "doutputs_batch doutputs_step *dproducts *dread *dfirst",
)
AddRows = _structure("add_rows", "rows size narrow *values values_stride *places *total total_stride")


class Losses(ctypes.Structure):
    """Structure of the loss kernel, which has a float field, unlike the others."""

    _fields_ = (
        ("rows", _SIZE),
        ("vocabulary", _SIZE),
        ("narrow", _SIZE),
        ("logits", _POINTER),
        ("logits_stride", _SIZE),
        ("targets", _POINTER),
        ("smoothing", ctypes.c_float),
        ("gradient", _SIZE),
        ("factors", _POINTER),
        ("losses", _POINTER),
        ("dbias", _POINTER),
    )


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "lstm_forward": LSTMForward,
    "lstm_backward": LSTMBackward,
    "attention_forward": AttentionForward,
    "combine_forward": CombineForward,
    "attention_backward": AttentionBackward,
    "weight_gradient": WeightGradient,
    "product_int8": ProductInt8,
    "best_words": BestWords,
    "lstm_sequence": LSTMSequence,
    "beam_search": BeamSearch,
    "search_step": SearchStep,
    "losses": Losses,
    "add_rows": AddRows,
    "recurrence_forward": RecurrenceForward,
    "recurrence_backward": RecurrenceBackward,
    "recurrence_summary": RecurrenceSummary,
    "scan_cell_forward": ScanCellForward,
    "scan_cell_backward": ScanCellBackward,
}

PARTS = {"weight": Weight}
"""Structures that other structures point to."""


class Library:
    """The loaded C library, and whether it uses PyTorch's OpenMP threads."""

    def __init__(self, path: Path, most: int = 2) -> None:
        """Loads the library.

        Args:
            path: file of the library.
            most: highest instruction set level to use, see kernels.c.

        Raises:
            ImportError: it was built from other sources.
            OSError: it is not a library for this machine.
        """
        library: Any = ctypes.CDLL(str(path))
        if not _fits(library):
            raise ImportError(f"{path} was built from sources of another version")
        threads = _openmp()
        self.has_threads = threads is not None
        library.econmt_start.argtypes = [_POINTER] * 3 + [ctypes.c_int]
        self.level: int = library.econmt_start(*(threads or (None, None, None)), most)
        self.functions: dict[str, Any] = {}
        for name, structure in STRUCTURES.items():
            function = getattr(library, f"econmt_{name}")
            function.argtypes = [ctypes.POINTER(structure), _SIZE]
            function.restype = ctypes.c_int
            self.functions[name] = function


def _fits(library: Any) -> bool:
    """Returns True if the library has the expected version and structures."""
    try:
        version, size = library.econmt_version, library.econmt_size
    except AttributeError:
        return False
    size.argtypes, size.restype = [ctypes.c_char_p], _SIZE
    return version() == _VERSION and all(
        size(name.encode()) == ctypes.sizeof(structure) for name, structure in {**STRUCTURES, **PARTS}.items()
    )


def _openmp() -> tuple[int, int, int] | None:
    """Returns addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads in PyTorch's OpenMP runtime."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).is_file():
            torch_library: Any = ctypes.CDLL(str(folder / name))  # also resolves symbols of its dependencies
            try:
                addresses = [
                    ctypes.cast(getattr(torch_library, symbol), _POINTER).value
                    for symbol in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
                ]
            except AttributeError:
                return None
            start, number, count = addresses
            return (start, number, count) if start and number and count else None
    return None
