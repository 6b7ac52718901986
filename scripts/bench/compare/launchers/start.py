"""Starts a program of a toolkit, which then also tells what the comparison has to know.

    python start.py econmt|joeynmt|fairseq|opennmt ARGUMENT...

The arguments are those of the toolkit's command line; for fairseq and OpenNMT-py the program (train, generate,
preprocess; train, translate) comes first. econmt and Joey NMT log tokens a second by a clock that goes on while their
process is stopped for another's turn, so their counts of target tokens are printed, too. The toolkits' files stay as
they are, and nothing here bears on the speed of training.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import FileFinder
from types import ModuleType

_OF_TRANSFORMS = {"ahocorasick": (), "fasttext": (), "rapidfuzz": ("fuzz", "process"), "spacy": ()}
"""Packages of OpenNMT-py's transforms, and the names that are imported from them."""
_dataclass = dataclasses.dataclass


def econmt() -> None:
    """Starts econmt, which also tells when training begins."""
    from econmt.cli.main import main
    from econmt.training.progress import Figures, Progress
    from econmt.training.trainer import Trainer

    figures, begin = Trainer._figures, Trainer._begin

    def counting_figures(self: Trainer, update: int) -> Figures:
        print(f"update {update}: {self.state.since_log.tokens} target tokens", flush=True)
        return figures(self, update)

    def telling_begin(self: Trainer, progress: Progress) -> None:
        self._tick()
        # Compiling kernels for the first update counts, as with toolkits that compile or load them when they are used.
        print(f"first update begins: {self.state.seconds:.2f} s", flush=True)
        begin(self, progress)

    Trainer._figures = counting_figures  # type: ignore[method-assign]
    Trainer._begin = telling_begin  # type: ignore[method-assign]
    main()


def joeynmt() -> None:
    """Starts Joey NMT."""
    from joeynmt.__main__ import main
    from joeynmt.training import TrainManager

    log = TrainManager._log_scores

    def counting_log(self, epoch, seconds, tokens_before, *others):  # type: ignore[no-untyped-def]
        tokens = self.stats.total_tokens - tokens_before
        print(f"update {self.stats.steps}: {tokens} target tokens", flush=True)
        return log(self, epoch, seconds, tokens_before, *others)

    TrainManager._log_scores = counting_log
    main()


def fairseq() -> None:
    """Starts a program of fairseq 0.12.2, which is of 2022, on a current Python and torch.

    Python 3.11 refuses a dataclass instance as a field's default unless its class is hashable, so the classes of
    fairseq and its configuration packages are made hashable. Python 3.12 has no ``find_module``, which hydra calls.
    """
    dataclasses.dataclass = _hashable_dataclass
    if not hasattr(FileFinder, "find_module"):
        FileFinder.find_module = _find_module  # type: ignore[attr-defined]
    importlib.import_module(f"fairseq_cli.{sys.argv.pop(1)}").cli_main()


def _hashable_dataclass(cls=None, /, **options):  # type: ignore[no-untyped-def]
    if cls is None:
        return functools.partial(_hashable_dataclass, **options)
    if cls.__module__.startswith(("fairseq", "hydra", "omegaconf")) and "__hash__" not in vars(cls):
        options["unsafe_hash"] = True
    return _dataclass(cls, **options)


def _find_module(finder: FileFinder, name: str) -> object:
    spec = finder.find_spec(name)
    return None if spec is None else spec.loader


def opennmt() -> None:
    """Starts a program of OpenNMT-py."""
    importlib.import_module(f"onmt.bin.{sys.argv.pop(1)}").main()


def _stand_in_for_missing() -> None:
    """Makes packages of transforms that OpenNMT-py imports and nothing here uses empty modules, if they are missing."""
    for name, attributes in _OF_TRANSFORMS.items():
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
            for attribute in attributes:
                setattr(sys.modules[name], attribute, None)


TOOLKITS: dict[str, Callable[[], None]] = {
    "econmt": econmt, "joeynmt": joeynmt, "fairseq": fairseq, "opennmt": opennmt,
}  # fmt: skip
if "opennmt" in sys.argv[:2]:
    _stand_in_for_missing()  # also in the processes that load data, which import this module
if __name__ == "__main__":
    sys.argv[0] = sys.argv.pop(1)
    TOOLKITS[sys.argv[0]]()
