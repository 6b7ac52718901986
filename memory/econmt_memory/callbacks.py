"""Callbacks of training libraries, which do what :class:`econmt_memory.watch` does, and take its arguments."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from econmt_memory.account.watching import watch
from econmt_memory.measure.patches import patched


def for_transformers(*args: Any, **options: Any) -> Any:
    """Returns a callback for ``transformers.Trainer``, which notices a full memory when its error ends the program."""
    kinds = _Callback, import_module("transformers").TrainerCallback
    return type("MemoryCallback", kinds, {})(*args, **options)


def for_lightning(*args: Any, **options: Any) -> Any:
    """Returns a callback for ``lightning.Trainer``, or for that of ``pytorch_lightning``."""
    library = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    return type("MemoryCallback", (_Callback, import_module(library).Callback), {})(*args, **options)


class _Callback(watch):
    """Watch with the methods that trainers call; those of transformers do not tell of errors."""

    def on_train_start(self, *_: Any, **__: Any) -> None:
        show = sys.excepthook

        def fail(*error: Any) -> None:
            self.__exit__(*error)
            show(*error)

        self.__enter__()
        self._hooks.enter_context(patched(sys, excepthook=fail))

    def on_exception(self, _trainer: Any, _module: Any, error: BaseException) -> None:
        self.__exit__(type(error), error, error.__traceback__)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.__exit__(None, None, None)

    on_train_begin = on_train_start
