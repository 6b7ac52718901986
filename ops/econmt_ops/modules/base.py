"""Base class of the replacements of `torch.nn.LSTM` and `torch.nn.GRU`."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import rnn as torch_rnn
from torch.nn.utils.rnn import PackedSequence

from econmt_ops.core.shapes import Shapes, kind_of
from econmt_ops.lstm.call_plans import resets_plan, run_whole
from econmt_ops.modules.directions import Prepare, StackedLayers
from econmt_ops.modules.resets import Segments, States, first_states
from econmt_ops.products.dropout import Seed, seed_of
from econmt_ops.products.stack import StackOptions


class RecurrentModule(StackedLayers, nn.RNNBase):
    """Stack of recurrent layers with the interface of `torch.nn.LSTM` and `torch.nn.GRU`.

    Parameters, initialization, checks of arguments, pickling and `repr` are inherited from PyTorch's own base class. It
    is no subclass of `torch.nn.LSTM` or `torch.nn.GRU`, because torch.compile refuses those.

    Args:
        mode: "LSTM" or "GRU".
        settings: Further arguments of `torch.nn.RNNBase`, in order.
        residual, variational, implementation: As of `econmt_ops.LSTM`.
    """

    def __init__(
        self, mode: str, settings: tuple[Any, ...], residual: bool, variational: bool, implementation: str
    ) -> None:
        super().__init__(mode, *settings)
        self.residual, self.variational, self.implementation = residual, variational, implementation

    def forward(
        self,
        input: Any,  # noqa: A002  its name in torch.nn
        hx: Any = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        dropout_seed: Seed | None = None,
    ) -> tuple[Any, Any]:
        """Runs the layers over a batch of sequences.

        Args:
            input: Inputs, (T, B, I), or (B, T, I) if batch_first; (T, I) for one sequence; or a `PackedSequence`.
            hx: Initial states as of the class in `torch.nn`: (h, c) of an LSTM, h of a GRU, each (D L, B, H) with D
                directions; (D L, H) for one sequence. None for zeros.
            lengths: Lengths of the rows, (B,) int64; None if every row has T steps.
            resets: (B, T) bool in either layout, (T,) for one sequence: True where the state begins anew, at zero, and
                no gradient flows to earlier steps. ``hx`` is for the first step; a reset there replaces it. In the
                reverse direction the steps before and after a reset are separated too. None: nowhere.
            dropout_seed: Seed of the dropout masks; None to draw one from torch's global generator.

        Returns:
            Outputs (T, B, D H), or as the input is laid out, zero at and after a row's length; and the states after
            each row's last step, as ``hx``.

        Raises:
            RuntimeError: If a size does not fit, as PyTorch does.
            ValueError: If the type or the number of dimensions does not fit, or ``lengths`` or ``resets``.
        """
        is_torchs = lengths is None and resets is None and dropout_seed is None
        if self.proj_size and is_torchs and not (self.residual or self.variational):
            by_torch: Any = torch_rnn.LSTM.forward
            return by_torch(self, input, hx)  # type: ignore[no-any-return]
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx, lengths, resets, dropout_seed)
        if input.dim() not in (2, 3):
            raise ValueError(f"{self.mode}: Expected input to be 2D or 3D, got {input.dim()}D instead")
        is_batched, axis = input.dim() == 3, 0 if self.batch_first else 1
        state = None if hx is None else self._states(hx)
        if not is_batched:
            input = input.unsqueeze(axis)  # noqa: A001
            resets = resets.unsqueeze(0) if isinstance(resets, Tensor) else resets
        if state is not None:
            state = self._batched(state, is_batched)
        rows = input if self.batch_first else input.transpose(0, 1)
        self._check(input, rows, state)
        outputs, last = self._run_rows(rows, state, lengths, resets, dropout_seed)
        if not self.batch_first:
            outputs = outputs.transpose(0, 1).contiguous()
        if not is_batched:
            outputs, last = outputs.squeeze(axis), tuple([part.squeeze(1) for part in last])
        return outputs, self._hx(last)

    def _run_packed(
        self, packed: PackedSequence, hx: Any, lengths: Any, resets: Any, seed: Seed | None
    ) -> tuple[PackedSequence, Any]:
        """Runs a packed sequence; see `forward`."""
        for name, value in (("lengths", lengths), ("resets", resets)):
            if value is not None:
                raise ValueError(
                    f"{self.mode}: {name} cannot be given with a PackedSequence; pass the padded tensor"
                )
        _, batch_sizes, sorted_indices, unsorted_indices = packed
        state = None
        if hx is not None:
            hx = self.permute_hidden(hx, sorted_indices)
            state = self._states(hx)
            if not torch.compiler.is_compiling():  # it reads the batch sizes
                self.check_forward_args(packed.data, self._hx(state), batch_sizes)
        self.check_input(packed.data, batch_sizes)
        batch = UnpackedBatch(packed, None if state is None else state[0].shape[1])
        outputs, last = self._run_rows(batch.inputs, state, batch.lengths, None, seed)
        return batch.pack(outputs), self.permute_hidden(self._hx(last), unsorted_indices)

    def _run_rows(
        self,
        inputs: Tensor,
        state: States | None,
        lengths: Tensor | None,
        resets: Tensor | None,
        seed: Seed | None,
    ) -> tuple[Tensor, States]:
        """Runs rows (B, T, I) from states (D L, B, H); returns outputs (B, T, D H) and the last states."""
        options = self._options(lengths, seed)
        if resets is None:
            return self._run(inputs, state, options)
        self._check_rows(inputs, lengths, resets)
        if state is not None:
            state = first_states(resets, lengths, state, len(self._suffixes(0)))
        by_kernels = self._run_resets(inputs, state, resets, options)
        if by_kernels is not None:
            return by_kernels
        segments = Segments(resets, lengths, inputs.device)
        options = options._replace(lengths=segments.lengths)
        outputs, last = self._run(segments.spread(inputs), state, options, segments.prepare)
        return segments.collect(outputs), last

    def _run(
        self, inputs: Tensor, state: States | None, options: StackOptions, prepare: Prepare | None = None
    ) -> tuple[Tensor, States]:
        """Runs rows that have no resets; see `_run_rows`. ``prepare``: see `StackedLayers._run_layers`."""
        by_layer = None if state is None else tuple(zip(*state, strict=True))
        outputs, last = self._run_layers(inputs, by_layer, options, prepare)
        return outputs, tuple([torch.stack(part).to(outputs.dtype) for part in zip(*last, strict=True)])

    def _run_resets(
        self, inputs: Tensor, state: States | None, resets: Tensor, options: StackOptions
    ) -> tuple[Tensor, States] | None:
        """Runs rows with resets by the kernels of LSTM layers, which heed them; None where none do."""
        if self.mode != "LSTM" or self.proj_size:
            return None
        layers = self._layers()
        plan = resets_plan(inputs, layers, state, options, self.implementation)
        if plan is None:
            return None
        begins = resets.t().contiguous().to(inputs.device, non_blocking=True)
        flat = [tuple(chain.from_iterable(layer)) for layer in layers]
        outputs, (h, c) = run_whole(plan, inputs, flat, state, options, len(layers[0]), begins)
        return outputs, (h, c.to(h.dtype))

    def _options(self, lengths: Tensor | None, seed: Seed | None) -> StackOptions:
        """Returns the options of a call, with a new dropout seed if ``seed`` is None and one is needed."""
        probability = self.dropout if self.num_layers > 1 else 0.0
        probability, seed = seed_of(self, probability, seed, self._device())
        return StackOptions(lengths, False, self.residual, probability, seed, self.variational)

    def _device(self) -> torch.device:
        weight: Tensor = self.weight_ih_l0  # type: ignore[assignment]
        return weight.device

    def _states(self, hx: Any) -> States:
        """Returns the states of ``hx``."""
        if self.mode == "GRU":
            if not isinstance(hx, Tensor):
                raise ValueError(f"GRU: hx must be a tensor, got {kind_of(hx)}")
            return (hx,)
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            raise ValueError(f"LSTM: hx must be (h_0, c_0), got {kind_of(hx)}")
        return tuple(hx)

    def _hx(self, states: States) -> Any:
        """Returns states in the form of ``hx``."""
        return states if self.mode == "LSTM" else states[0]

    def _parts(self, layer: int, reverse: bool) -> list[Tensor]:
        """Returns the two matrices of a layer in one direction, and its two biases, zeros if it has none."""
        suffix = self._suffixes(layer)[int(reverse)]
        matrices = [getattr(self, name + suffix) for name in ("weight_ih", "weight_hh")]
        if not self.bias:
            return [*matrices, *[matrices[1].new_zeros(len(matrices[1]))] * 2]
        return [*matrices, *(getattr(self, name + suffix) for name in ("bias_ih", "bias_hh"))]

    def _batched(self, state: States, is_batched: bool) -> States:
        """Returns initial states (D L, B, H) from those of the caller, which lack B for one sequence."""
        wanted = 3 if is_batched else 2
        if any(part.dim() != wanted for part in state):
            kind = "batched 3-D" if is_batched else "unbatched 2-D"
            found = ", ".join(f"{part.dim()}-D" for part in state)
            names = "hx and cx" if len(state) == 2 else "hx"
            raise RuntimeError(
                f"For {kind} input, {names} should also be {wanted}-D but got ({found}) tensors"
            )
        return state if is_batched else tuple([part.unsqueeze(1) for part in state])

    def _check(self, inputs: Tensor, rows: Tensor, state: States | None) -> None:
        """Checks inputs, in the layout of the caller and as rows (B, T, I), and states with PyTorch's errors."""
        self.check_input(inputs, None)
        if state is not None:
            self.check_forward_args(inputs, self._hx(state), None)
        if rows.shape[1] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        others = [("parameter", self._device()), *(("hidden", part.device) for part in state or ())]
        for kind, device in others:
            if device != inputs.device:
                raise RuntimeError(
                    f"Input and {kind} tensors are not at the same device, found input tensor at "
                    f"{inputs.device} and {kind} tensor at {device}"
                )

    def _check_rows(self, inputs: Tensor, lengths: Tensor | None, resets: Tensor) -> None:
        """Checks lengths and resets of inputs (B, T, I)."""
        batch, steps, _ = inputs.shape
        if lengths is not None:
            check = Shapes(self.mode, T=steps)
            check("input", inputs, "B T I")
            check.lengths(lengths, "T")
        is_mask = isinstance(resets, Tensor) and resets.dtype == torch.bool
        if not is_mask or tuple(resets.shape) != (batch, steps):
            found = f"{resets.dtype} {tuple(resets.shape)}" if isinstance(resets, Tensor) else kind_of(resets)
            raise ValueError(
                f"{self.mode}: resets must be a bool tensor (B, T) = ({batch}, {steps}), whatever batch_first is, "
                f"got {found}"
            )
        if resets.device.type not in ("cpu", inputs.device.type):
            raise ValueError(
                f"{self.mode}: resets is on {resets.device}; it must be on the CPU or on {inputs.device}"
            )

    def extra_repr(self) -> str:
        """Returns what the class in `torch.nn` shows, and further settings that differ from the defaults."""
        return super().extra_repr() + self._changed("residual", "variational")


class UnpackedBatch:
    """Padded batch of a packed sequence, its rows in the packed order (longest first).

    The batch sizes of a packed sequence are on the CPU, so that nothing waits for a GPU.

    Args:
        packed: Packed sequence with data (N, I).
        batch: B if it is known, so that torch.compile need not read it from the batch sizes.

    Attributes:
        inputs: Padded batch, (B, T, I), zero past a row's length. Time comes first in memory.
        lengths: Lengths of the rows, (B,) int64 on the CPU.
    """

    def __init__(self, packed: PackedSequence, batch: int | None = None) -> None:
        self._packed = packed
        data, sizes, order, _ = packed
        if batch is None:
            batch = int(sizes[0]) if order is None else len(order)
        steps, ends = len(sizes), sizes.cumsum(0)
        self.lengths = (sizes.unsqueeze(1) > torch.arange(batch, device=sizes.device)).sum(0)
        number = torch.arange(len(data), device=sizes.device)
        step = torch.searchsorted(ends, number, right=True)
        places = step * batch + number - (ends - sizes)[step]
        self._places = places.to(data.device, non_blocking=True)
        padded = data.new_zeros(steps * batch, data.shape[1]).index_copy(0, self._places, data)
        self.inputs = padded.view(steps, batch, -1).transpose(0, 1)

    def pack(self, outputs: Tensor) -> PackedSequence:
        """Packs outputs (B, T, H) as the inputs were."""
        rows = outputs.transpose(0, 1).flatten(0, 1).index_select(0, self._places)
        _, *order = self._packed
        return PackedSequence(rows, *order)
