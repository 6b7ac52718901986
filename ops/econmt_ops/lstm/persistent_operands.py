"""Arguments of a persistent LSTM layer, and operands of its products and recurrence, made by one launch per direction.

Sizes: D directions, B batch, T steps, I input size, I' its width in products, H hidden, N distinct rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt_ops.core.alignment import even
from econmt_ops.core.chunks import rows_of


class LayerSettings(NamedTuple):
    """Settings of a layer, which do not follow from its tensors.

    Attributes:
        dtype, products: Type of the large products, and of those in the recurrence.
        reverse: For each direction True if it walks from the last step to the first.
        cells: Type of the last c.
        gru: True for a GRU whose weights are those of `econmt_ops.lstm.triton.gru`.
    """

    dtype: torch.dtype
    products: torch.dtype
    stash: str
    reverse: tuple[bool, ...]
    cells: torch.dtype = torch.float32
    gru: bool = False


class LayerTensors(NamedTuple):
    """Arguments of a layer.

    Attributes:
        inputs: (T, B, I); with ``places`` distinct rows (N, I). None if the rows of the products are known already.
        weights: For each direction input weights (4H, I), recurrent weights (4H, H) and one or two biases (4H,), all
            contiguous.
        state: h and c before the first step, (D, B, H) each; None: zeros.
        lengths: (B,) on the device, or None.
        places: Row index of each position, (T, B), or None.
        resets: (T, B) bool, contiguous and on the device: True where the state begins anew, see
            `econmt_ops.modules.base.RecurrentModule.forward`. Initial states are zero for rows that begin with one.
            None: nowhere.
    """

    inputs: Tensor | None
    weights: Sequence[Tensor]
    state: tuple[Tensor, Tensor] | None = None
    lengths: Tensor | None = None
    places: Tensor | None = None
    resets: Tensor | None = None


class LayerOperands(NamedTuple):
    """Tensors that the products and the recurrence read.

    Attributes:
        rows: Inputs as they are multiplied, (T B, I') or (N, I').
        matrices: Input weights (4H, I') of each direction.
        recurrents: (D 4H, H), in the type of the recurrence's products; if that is not the compute type, each row is
            multiplied by one of the ``factors`` (D 4H,), powers of two.
        biases: (4H,) of each direction; the sum of two if biases are read.
        workspace: int32, that begins with zeros for counters.
    """

    rows: Tensor
    matrices: list[Tensor]
    recurrents: Tensor
    factors: Tensor
    biases: list[Tensor]
    workspace: Tensor


class OperandMaker:
    """Makes the operands of layers of one kind; what has the right type and layout already is not copied.

    Takes shape and type of the inputs, (T, B, I) or (N, I), types of the weights, direction by direction, and H.

    Attributes:
        width: I'.
        copied, rows_bytes: Bytes of the weights that are copied, and of the rows.
    """

    def __init__(
        self,
        settings: LayerSettings,
        inputs: tuple[torch.Size, torch.dtype],
        types: tuple[torch.dtype, ...],
        hidden: int,
    ) -> None:
        self._dtype, self._products = dtype, products = settings.dtype, settings.products
        self._narrows = products != dtype
        self._directions = directions = len(settings.reverse)
        shape, self._inputs_type = inputs
        self._hidden = hidden
        self._size = size = shape[-1]
        self._shape = (*shape[:-1], 1)[:2]
        self.width = even(size, dtype)
        self._each = len(types) // directions
        self._copies_inputs = self._inputs_type != dtype or self.width != size
        # The recurrent weights of several directions are gathered in one tensor.
        self._copies_recurrents = directions > 1 or types[1] != products
        self._copies_matrix = [kind != dtype or self.width != size for kind in types[:: self._each]]
        self._copies_bias = [self._each > 3 or kind != dtype for kind in types[2 :: self._each]]
        self.rows_bytes = math.prod(shape[:-1]) * self.width * dtype.itemsize
        self.copied = sum(self._copies_matrix) * 4 * hidden * self.width * dtype.itemsize
        if self._copies_recurrents:
            self.copied += directions * 4 * hidden * hidden * products.itemsize
        self._launches: dict[tuple[Any, ...], tuple[Any, int, tuple[int, ...], tuple[int, int]]] = {}

    def _launch_of(
        self, tensors: Sequence[Tensor], number: int, reads: bool, padded: bool, zeros: int, bias: bool
    ) -> tuple[Any, int, tuple[int, ...], tuple[int, int]]:
        """Returns the launch for a direction, its programs and integers, and the strides of the weights' rows."""
        from econmt_ops.backends.triton.layer_kernels import preparation

        copies_matrix, copies_bias = self._copies_matrix[number], bias and self._copies_bias[number]
        types = tuple([tensor.dtype for tensor in tensors])
        sized = reads or copies_matrix
        launch, programs, *ends = preparation(
            (*self._shape, self._size) if reads else None,
            padded,
            self._size if sized else 0,
            self.width if sized else 0,
            self._hidden,
            (copies_matrix, self._copies_recurrents),
            self._narrows,
            self._each - 2 if copies_bias else 0,
            zeros,
            types,
        )
        strides = self._size if copies_matrix else 0, self._hidden if self._copies_recurrents else 0
        return launch, programs, (*(self._shape if reads else (0, 0)), zeros, *ends), strides

    def __call__(
        self,
        inputs: Tensor | None,
        rows: Tensor | None,
        weights: Sequence[Tensor],
        workspace: tuple[int, int],
        bias: bool,
        lengths: Tensor | None = None,
    ) -> LayerOperands:
        """Makes the operands of a layer.

        Args:
            inputs: (T, B, I) or (N, I); not read if there are ``rows``, the inputs as they are multiplied.
            weights: As in `LayerTensors`.
            workspace: How many integers the workspace has, and with how many zeros it begins.
            bias: True if biases are read, so that two are added up.
            lengths: (B,) int64, if ``inputs`` (T, B, I) are read as zeros from there on; their values may be anything.
        """
        device, hidden, dtype = weights[0].device, self._hidden, self._dtype
        scratch = torch.empty(workspace[0], dtype=torch.int32, device=device)
        recurrents = weights[1]
        if self._copies_recurrents:
            shape = self._directions * 4 * hidden, hidden
            recurrents = torch.empty(shape, dtype=self._products, device=device)
        factors = torch.empty(
            self._directions * 4 * hidden if self._narrows else 0, dtype=torch.float32, device=device
        )
        read: Tensor | None = None
        if rows is None:
            assert inputs is not None
            if self._copies_inputs or lengths is not None or not inputs.is_contiguous():
                read = rows_of(inputs if inputs.dim() == 3 else inputs.unsqueeze(1))
                rows = torch.empty((read.shape[0] * read.shape[1], self.width), dtype=dtype, device=device)
            else:
                rows = inputs.view(-1, self.width)
        matrices, biases, each = [], [], self._each
        for number in range(self._directions):
            matrix, square, *parts = weights[number * each : (number + 1) * each]
            tensors = [scratch] * 12
            step = row = 0
            if read is not None:
                tensors[0], tensors[1] = read, rows
                step, row, _ = read.stride()
                tensors[11] = scratch if lengths is None else lengths
            if self._copies_matrix[number]:
                copy = torch.empty((4 * hidden, self.width), dtype=dtype, device=device)
                tensors[2], tensors[3] = matrix, copy
                matrix = copy
            if self._copies_recurrents:
                tensors[4] = square
                tensors[5] = recurrents[4 * hidden * number :] if number else recurrents
                tensors[6] = factors[4 * hidden * number :]
            total = parts[0]
            if bias and self._copies_bias[number]:
                total = torch.empty(4 * hidden, dtype=dtype, device=device)
                tensors[7:10] = parts[0], parts[-1], total
            zeros = workspace[1] if number == 0 else 0
            padded = read is not None and lengths is not None
            key = number, read is not None, padded, zeros, bias
            if key not in self._launches:
                self._launches[key] = self._launch_of(tensors, *key)
            launch, programs, integers, strides = self._launches[key]
            launch(programs, tensors, integers, (step, row, *strides))
            matrices.append(matrix)
            biases.append(total)
            read = None
        return LayerOperands(rows, matrices, recurrents, factors, biases, scratch)
