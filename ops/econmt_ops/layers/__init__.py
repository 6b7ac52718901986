"""What the layers of all cells but the LSTM share: the op, the stack, and the loops of both families of cells."""

from __future__ import annotations
