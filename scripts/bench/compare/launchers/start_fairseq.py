"""Starts one of fairseq's programs (train, generate, preprocess) on a current Python and torch.

fairseq 0.12.2 is of 2022. Python 3.11 refuses a dataclass instance as a field's default unless its class is hashable;
so the classes of fairseq and its configuration packages are made hashable from outside. Python 3.12 has no
``find_module``, which hydra calls. In translation the encoder of a transformer calls a function of torch that takes
other arguments by now, so its other way is taken. Their files stay as they are, and nothing here bears on the speed of
training, which saves models at the seconds that ``marks`` has been given.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from importlib.machinery import FileFinder
from pathlib import Path

from marks import Marks

_dataclass = dataclasses.dataclass


def _hashable_dataclass(cls=None, /, **options):  # type: ignore[no-untyped-def]
    if cls is None:
        return functools.partial(_hashable_dataclass, **options)
    if cls.__module__.startswith(("fairseq", "hydra", "omegaconf")) and "__hash__" not in vars(cls):
        options["unsafe_hash"] = True
    return _dataclass(cls, **options)


def _find_module(finder: FileFinder, name: str) -> object:
    spec = finder.find_spec(name)
    return None if spec is None else spec.loader


def _without_fast_path() -> None:
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    init = TransformerEncoderLayerBase.__init__

    def plain_init(self, *arguments, **options):  # type: ignore[no-untyped-def]
        init(self, *arguments, **options)
        self.can_use_fastpath = False

    TransformerEncoderLayerBase.__init__ = plain_init


def _save_at(marks: Marks) -> None:
    from fairseq.trainer import Trainer

    train_step = Trainer.train_step

    def marked_step(self, *arguments, **options):  # type: ignore[no-untyped-def]
        marks.begin()
        result = train_step(self, *arguments, **options)

        def save(folder: Path) -> None:
            self.consolidate_optimizer()
            self.save_checkpoint(str(folder / "checkpoint_last.pt"), {})

        if marks.updated(self.get_num_updates(), save):
            self.cfg.optimization.max_update = self.get_num_updates()
        return result

    Trainer.train_step = marked_step


def main() -> None:
    dataclasses.dataclass = _hashable_dataclass
    if not hasattr(FileFinder, "find_module"):
        FileFinder.find_module = _find_module  # type: ignore[attr-defined]
    program = sys.argv[1]
    sys.argv[1:] = sys.argv[2:]
    sys.argv[0] = f"fairseq-{program}"
    if program == "generate":
        _without_fast_path()
    marks = Marks.from_environment()
    if program == "train" and marks is not None:
        _save_at(marks)
    importlib.import_module(f"fairseq_cli.{program}").cli_main()


if __name__ == "__main__":
    main()
