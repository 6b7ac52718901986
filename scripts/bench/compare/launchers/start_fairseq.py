"""Starts one of fairseq's programs (train, generate, preprocess) on Python 3.11 and a current torch.

fairseq 0.12.2 is of 2022. Python 3.11 refuses a dataclass instance as a field's default unless its class is hashable;
so the classes of fairseq and its configuration packages are made hashable from outside. Their files stay as they are,
and nothing here bears on speed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys

_dataclass = dataclasses.dataclass


def _hashable_dataclass(cls=None, /, **options):  # type: ignore[no-untyped-def]
    if cls is None:
        return functools.partial(_hashable_dataclass, **options)
    if cls.__module__.startswith(("fairseq", "hydra", "omegaconf")) and "__hash__" not in vars(cls):
        options["unsafe_hash"] = True
    return _dataclass(cls, **options)


def main() -> None:
    dataclasses.dataclass = _hashable_dataclass
    program = sys.argv[1]
    sys.argv[1:] = sys.argv[2:]
    sys.argv[0] = f"fairseq-{program}"
    importlib.import_module(f"fairseq_cli.{program}").cli_main()


if __name__ == "__main__":
    main()
