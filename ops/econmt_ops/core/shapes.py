"""Checks of shapes and types whose messages state the expected and the actual value."""

from __future__ import annotations

import torch
from torch import Tensor, device, int64, strided
from torch._subclasses.fake_tensor import FakeTensor

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Shapes:
    """Checker of one call's arguments, which learns each size from the first tensor that names it.

    Each check raises ValueError if an argument does not fit; the message names the expected and the actual value.

    >>> check = Shapes("additive_attention")
    >>> check("query", query, "B T A")
    >>> check("keys", keys, "B S A")    # B and A must now agree with query
    """

    def __init__(self, op: str, **sizes: int) -> None:
        self.op = op
        self.sizes = sizes
        self._device: device | None = None

    def __call__(self, name: str, tensor: Tensor, shape: str) -> None:
        """Checks one floating point tensor.

        Args:
            name: Name of the argument, for the message.
            tensor: The argument.
            shape: Names of the sizes, separated by blanks ("B T H"); a number before a known name multiplies it ("4H").
        """
        check_tensor(self.op, name, tensor)
        if not tensor.is_floating_point():
            raise ValueError(f"{self.op}: {name} must be a floating point tensor, got {tensor.dtype}")
        if tensor.dtype not in _TYPES:
            raise ValueError(
                f"{self.op}: {name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}"
            )
        self.check_size(name, tensor, shape)
        if self._device is None:
            self._device = tensor.device
        elif tensor.device != self._device:
            raise ValueError(
                f"{self.op}: {name} is on {tensor.device}, the arguments before it on {self._device}"
            )

    def check_size(self, name: str, tensor: Tensor, shape: str) -> None:
        """Checks the sizes alone; see `__call__`."""
        letters = shape.split()
        sizes = tuple(tensor.shape)
        if len(sizes) != len(letters):
            raise self._misfit(name, letters, sizes)
        for letter, size in zip(letters, sizes, strict=True):
            expected = self._expected(letter)
            if expected is not None and expected != size:
                raise self._misfit(name, letters, sizes)
        for letter, size in zip(letters, sizes, strict=True):
            if letter not in self.sizes:
                self.sizes[letter] = size

    def not_empty(self, name: str, tensor: Tensor) -> None:
        """Checks that the second dimension, the positions, is not empty."""
        if tensor.shape[1] == 0:
            raise ValueError(f"{self.op}: {name} must have at least one position, got {tuple(tensor.shape)}")

    def indices(self, name: str, tensor: Tensor, shape: str) -> None:
        """Checks an int64 tensor, which may be on another device."""
        check_tensor(self.op, name, tensor)
        if tensor.dtype != int64:
            raise ValueError(f"{self.op}: {name} must be an int64 tensor, got {tensor.dtype}")
        self.check_size(name, tensor, shape)

    def norm(self, pair: object, name: str = "layer_norm", size: str = "A") -> None:
        """Checks gain and bias of a layer normalization, each (A,) or of another size, if there is one."""
        if pair is None:
            return
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"{self.op}: {name} must be (gain, bias), got {kind_of(pair)}")
        self(f"{name} gain", pair[0], size)
        self(f"{name} bias", pair[1], size)

    def lengths(self, tensor: Tensor | None, positions: str) -> None:
        """Checks the lengths of a batch's rows, (B,) or None; on the CPU also that they are within the positions."""
        if tensor is None:
            return
        self.indices("lengths", tensor, "B")
        if tensor.device.type not in ("cpu", self._device.type if self._device is not None else "cpu"):
            raise ValueError(
                f"{self.op}: lengths is on {tensor.device}, the other arguments on {self._device}"
            )
        self.bounded("lengths", tensor, self.sizes[positions])

    def bounded(self, name: str, tensor: Tensor, most: int, ignored: int | None = None) -> None:
        """Checks that an int64 tensor has values from 0 to ``most``, or ``ignored``.

        Only on the CPU, because a GPU would wait, and not within torch.func, where values may be those of a batch.
        """
        if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return
        if not tensor.numel() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
        if ignored is not None:
            tensor = tensor.masked_fill(tensor == ignored, 0)
        lowest, highest = (int(value) for value in torch.aminmax(tensor.detach()))
        if lowest < 0 or highest > most:
            wanted = f"from 0 to {most}{'' if ignored is None else f', or {ignored}'}"
            raise ValueError(f"{self.op}: {name} must be {wanted}, got {lowest if lowest < 0 else highest}")

    def _expected(self, letter: str) -> int | None:
        """Returns the size of a letter, or None if it is not known yet."""
        if letter in self.sizes:
            return self.sizes[letter]
        name = letter.lstrip("0123456789")
        if name == letter or name not in self.sizes:
            return None
        return int(letter.removesuffix(name)) * self.sizes[name]

    def _misfit(self, name: str, letters: list[str], sizes: tuple[int, ...]) -> ValueError:
        wanted = f"({letters[0]},)" if len(letters) == 1 else f"({', '.join(letters)})"
        known = {letter: self._expected(letter) for letter in letters}
        hint = ", ".join(f"{letter}={size}" for letter, size in known.items() if size is not None)
        return ValueError(f"{self.op}: {name} must be {wanted}{f' with {hint}' if hint else ''}, got {sizes}")


def check_tensor(op: str, name: str, value: object) -> None:
    """Checks that an argument is a dense tensor.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{op}: {name} must be a tensor, got {kind_of(value)}")  # noqa: TRY004  as all of its errors
    if value.layout != strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else value.layout
        raise ValueError(f"{op}: {name} must be a dense tensor, got {kind}")


def kind_of(value: object) -> str:
    """Describes an argument of an unexpected type, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def check_dropout(op: str, dropout: float, seed: object) -> None:
    """Checks a dropout probability and its seed.

    Raises:
        ValueError: If the probability is not in [0, 1), or is not zero while the seed is missing or invalid.
    """
    if not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"{op}: dropout must be at least 0 and less than 1, got {dropout}")
    if dropout > 0.0 and seed is None:
        raise ValueError(f"{op}: dropout {dropout} needs dropout_seed, an int")
    if isinstance(seed, tuple):  # a `RowsSeed`
        seed = seed[0]
    is_int = isinstance(seed, int) and -(2**63) <= seed < 2**63
    is_scalar = isinstance(seed, Tensor) and seed.dtype == int64 and seed.numel() == 1
    if seed is not None and not is_int and not is_scalar:
        raise ValueError(
            f"{op}: dropout_seed must be an int of 64 bits or an int64 scalar tensor, got {kind_of(seed)}"
        )
