"""econmt: trains attention-LSTM translation models in little memory."""

from __future__ import annotations

__version__ = "0.1.0"
