"""Times matrix products in each memory layout.

    python -m scripts.bench layout
    python -m scripts.bench layout --device cuda --graph

The products of X (N, I) and W (O, I), Y = X W^T (N, O), are those of each library, forward and backward. "by rows" and
"by columns" tell how activations are stored: (N, I), or (I, N) and so feature-major.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

import econmt_ops
from econmt.bench.rows import Row
from econmt.checkpoint.tensor_files import dtype_name
from econmt.engine.devices import reproducible
from econmt_ops.linear import LAYOUTS
from econmt_ops.products.packed import is_available
from scripts.bench.frame import Bench, in_graph, in_turns

PAPER = (64, 512, 2048)
"""N, I, O of the published comparison: 64 sentences, 512 units, four gates."""
REPLAYED = 50
"""Calls in a CUDA graph: launching it costs as much as one product takes."""

_Functions = dict[tuple[str, str, str], Callable[[], object]]
"""Functions by operation, library and layout."""


def rows_of(
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int, int]],
    device: torch.device,
    seconds: float,
    graph: bool = False,
) -> Iterator[Row]:
    """Yields a row for each layout, library and product of N, I and O, which take ``seconds`` together.

    ``graph`` times calls in CUDA graphs, where launching them costs nothing.
    """
    calls = REPLAYED if graph else 1
    for dtype, (rows, inputs, outputs) in product(dtypes, shapes):
        for functions in _groups(rows, inputs, outputs, dtype, device):
            timed = {key: in_graph(call, device, calls) if graph else call for key, call in functions.items()}
            for (what, library, layout), timing in in_turns(timed, device, seconds=seconds).items():
                passes = 3 if what == "forward and backward" else 1
                yield {
                    "dtype": dtype_name(dtype), "rows": rows, "inputs": inputs, "outputs": outputs, "what": what,
                    "library": library, "layout": layout, "milliseconds": 1e3 * timing.median / calls,
                    "highest decile": 1e3 * timing.high / calls,
                    "GFLOP/s": passes * 2 * rows * inputs * outputs * calls / timing.median / 1e9,
                }  # fmt: skip


def _groups(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> Iterator[_Functions]:
    """Yields the candidates of each comparison."""
    x, weight, y = (
        torch.randn(size, device=device).to(dtype)
        for size in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    turned, x_columns, y_columns = (tensor.t().contiguous() for tensor in (weight, x, y))
    library = _library(dtype, device)
    forward: _Functions = {
        ("forward", library, "by rows: X W^T"): lambda: torch.mm(x, weight.t()),
        ("forward", library, "by rows, W transposed: X V"): lambda: torch.mm(x, turned),
        ("forward", library, "W X^T of X by rows"): lambda: torch.mm(weight, x.t()),
        ("forward", library, "by columns: W X^T"): lambda: torch.mm(weight, x_columns),
        ("forward", library, "by columns, W transposed: V^T X^T"): lambda: torch.mm(turned.t(), x_columns),
    }
    to_inputs: _Functions = {
        ("backward, X", library, "by rows: dY W"): lambda: torch.mm(y, weight),
        ("backward, X", library, "by rows, W transposed: dY V^T"): lambda: torch.mm(y, turned.t()),
        ("backward, X", library, "by columns: W^T dY^T"): lambda: torch.mm(weight.t(), y_columns),
        ("backward, X", library, "by columns, W transposed: V dY^T"): lambda: torch.mm(turned, y_columns),
    }
    to_weight: _Functions = {
        ("backward, W", library, "by rows: dY^T X"): lambda: torch.mm(y.t(), x),
        ("backward, W", library, "by rows, W transposed: X^T dY"): lambda: torch.mm(x.t(), y),
        ("backward, W", library, "by columns: dY^T X"): lambda: torch.mm(y_columns, x_columns.t()),
        ("backward, W", library, "by columns, W transposed: X^T dY"): lambda: torch.mm(
            x_columns, y_columns.t()
        ),
    }
    if is_available(x):
        packed, packed_turned = pack(weight, rows), pack(turned, rows)
        forward[("forward", "oneDNN", "by rows: X W^T")] = lambda: by_onednn(x, weight)
        forward[("forward", "oneDNN", "by rows, W packed before")] = lambda: by_onednn(x, packed)
        key = ("backward, X", "oneDNN", "by rows, W^T packed before")
        to_inputs[key] = lambda: by_onednn(y, packed_turned)
    yield forward
    yield to_inputs
    yield to_weight
    x.requires_grad_()
    weight.requires_grad_()
    yield {
        ("forward and backward", "econmt_ops.linear", layout): partial(_both_ways, x, weight, y, layout)
        for layout in LAYOUTS
    }


def _both_ways(x: Tensor, weight: Tensor, y: Tensor, layout: str) -> object:
    return torch.autograd.grad(econmt_ops.linear(x, weight, layout=layout), (x, weight), y)


def pack(weight: Tensor, rows: int) -> Tensor:
    """Packs a weight (O, I) into oneDNN's blocks for products with about this many rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return packed


def by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """Computes X W^T (N, O) by oneDNN, for ``x`` (N, I) and a ``weight`` (O, I), packed or not."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _library(dtype: torch.dtype, device: torch.device) -> str:
    """Returns the name of the library that torch uses for a product."""
    if device.type == "cuda":
        return "cuBLAS"
    if dtype == torch.bfloat16 and torch._C._has_mkldnn:
        return "oneDNN"
    return "MKL" if torch._C.has_mkl else "BLAS"


def main(words: Sequence[str] | None = None) -> None:
    """Runs the benchmark; see the module's docstring."""
    bench = Bench(__doc__, device="auto", seconds=0.5)
    add = bench.add_argument
    add("--dtype", nargs="+", default=["float32", "bfloat16"], help="types of the operands (%(default)s)")
    add("--graph", action="store_true", help="time calls in CUDA graphs, without the time of launching them")
    given = bench.begin(words)
    dtypes = [getattr(torch, name) for name in given.dtype]
    with reproducible(bench.device, given.threads):
        bench.print_header()
        rows = rows_of(dtypes, [PAPER], given.device, given.seconds, given.graph)
        bench.report(rows, "layouts: X (rows, inputs), W (outputs, inputs)")
