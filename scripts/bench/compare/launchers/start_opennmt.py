"""Starts one of OpenNMT-py's programs (train, translate).

OpenNMT-py 3.5 imports the packages of all its transforms. Those that are not installed, none of which is used here,
become empty modules, also in the processes that load data. Training saves models at the seconds that ``marks`` has
been given.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from marks import Marks

_OF_TRANSFORMS = {"ahocorasick": (), "fasttext": (), "rapidfuzz": ("fuzz", "process"), "spacy": ()}
"""Packages of transforms, and the names that are imported from them."""


def _stand_in_for_missing() -> None:
    for name, attributes in _OF_TRANSFORMS.items():
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
            for attribute in attributes:
                setattr(sys.modules[name], attribute, None)


def _save_at(marks: Marks) -> None:
    from onmt.trainer import Trainer

    accumulate, report = Trainer._gradient_accumulation, Trainer._maybe_report_training

    def marked_accumulation(self, *arguments):  # type: ignore[no-untyped-def]
        marks.begin()
        return accumulate(self, *arguments)

    def marked_report(self, step, *arguments):  # type: ignore[no-untyped-def]
        result = report(self, step, *arguments)

        def save(folder: Path) -> None:
            self.model_saver.base_path = str(folder / "model")
            self.model_saver.save(step)

        if marks.updated(step, save):
            sys.exit()
        return result

    Trainer._gradient_accumulation, Trainer._maybe_report_training = marked_accumulation, marked_report


_stand_in_for_missing()


def main() -> None:
    program = sys.argv[1]
    sys.argv[1:] = sys.argv[2:]
    sys.argv[0] = f"onmt_{program}"
    marks = Marks.from_environment()
    if program == "train" and marks is not None:
        _save_at(marks)
    importlib.import_module(f"onmt.bin.{program}").main()


if __name__ == "__main__":
    main()
