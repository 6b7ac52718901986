"""Memory of a PyTorch training step by module and category: measured, predicted and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Account", "__version__", "compare", "predict", "track", "watch"]

if TYPE_CHECKING:
    from econmt_memory.account.account import Account as Account
    from econmt_memory.account.comparison import compare as compare
    from econmt_memory.account.prediction import predict as predict
    from econmt_memory.account.tracking import track as track
    from econmt_memory.account.watching import watch as watch
else:
    _HOMES = {"Account": "account", "compare": "comparison", "predict": "prediction"}
    _HOMES |= {"track": "tracking", "watch": "watching"}

    def __getattr__(name: str) -> object:
        """Imports the parts of the memory account, and with them torch, on first use."""
        if name not in _HOMES:
            raise AttributeError(f"module 'econmt_memory' has no attribute '{name}'")
        from importlib import import_module

        return getattr(import_module(f"econmt_memory.account.{_HOMES[name]}"), name)
