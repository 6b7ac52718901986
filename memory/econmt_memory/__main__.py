"""Command line: python -m econmt_memory script.py, and python -m econmt_memory predict."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import sys
from bisect import bisect_right
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from econmt_memory.account.account import Account
from econmt_memory.account.prediction import predict
from econmt_memory.account.watching import watch
from econmt_memory.report.tables import format_bytes
from econmt_memory.report.text import printable

NAME = "python -m econmt_memory"
SCRIPT = f"""Runs a script as it is, and tells on standard error where the bytes of a training step went.

  {NAME} train.py --epochs 1
  {NAME} --step 20 --html memory.html train.py        options stand before the script
  torchrun --nproc-per-node 2 -m econmt_memory train.py
  {NAME} predict --help
"""
PREDICTION = f"""Predicts the memory of a training step of a language model of transformers.

The model is built from its configuration: nothing is downloaded, and no GPU is needed.

  {NAME} predict --model config.json --batch 8 --length 512
  {NAME} predict --model config.json --dtype bfloat16 --fits 24GB
  {NAME} predict --model config.json --budget 8GB     exits with 1 if it needs more
"""
OPTIMIZERS = "adafactor", "adagrad", "adam", "adamw", "nadam", "radam", "rmsprop", "sgd"
CODE = "auto_map|quantization_config|.*_implementation"
"""Keys of configurations that name code or kernels elsewhere."""


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(name, argparse.SUPPRESS, text, formatter_class=kind, allow_abbrev=False)
    parser.add_argument("--html", metavar="PAGE", type=_file, help="write a page with charts")
    parser.add_argument("--json", metavar="FILE", type=_file, help="write the account, for memory.compare")
    return parser


def _file(text: str) -> Path:
    path = Path(text).absolute()  # a script may change its folder
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def _size(text: str) -> int:
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT])(i?)B", text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 24GB, 24GiB or 500MB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2]))


def run_script(words: list[str]) -> None:
    """Runs a script, and tracks one of its steps. The script's errors and its exit code are those of the process."""
    parser = _parser(NAME, SCRIPT)
    parser.add_argument("--step", metavar="N", type=int, default=3, help="its number (default: 3)")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    if not given.script.is_file():
        parser.error(f"{given.script}: no such file")
    try:
        watched = watch(given.html, step=given.step)
    except ValueError as error:
        parser.error(str(error))
    sys.argv = [str(given.script), *given.arguments]
    sys.path[0] = str(given.script.resolve().parent)
    try:
        with watched:
            runpy.run_path(str(given.script), run_name="__main__")
    finally:
        if watched.account is not None:
            watched.account.show(console=Console(stderr=True, width=None if sys.stderr.isatty() else 80))
            watched.account.to_json(given.json)
        elif watched.steps < given.step:  # else another rank tells
            remedy = "try --step 1" if watched.steps else "each needs modules in training mode and an update"
            print(f"{given.script} ended after {watched.steps} steps; {remedy}", file=sys.stderr)


def run_prediction(words: list[str]) -> int:
    """Predicts a step; returns 1 if it needs more than the budget, else 0."""
    parser = _parser(f"{NAME} predict", PREDICTION)
    add = parser.add_argument
    add("--model", metavar="CONFIG", type=Path, required=True, help="configuration, a JSON file")
    add("--batch", metavar="N", type=int, default=8, help="rows of a batch (default: 8)")
    add("--length", metavar="N", type=int, default=512, help="tokens of a row (default: 512)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: float32")
    add("--autocast", action="store_true", help="compute in bfloat16")
    add("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    add("--fits", metavar="SIZE", type=_size, help="find the largest batch, and length, for 24GB or so")
    add("--budget", metavar="SIZE", type=_size, help="exit with 1 if the step needs more")
    given = parser.parse_args(words)
    if min(given.batch, given.length) < 1:
        parser.error(f"--batch {given.batch} --length {given.length}: each must be 1 or more")
    try:
        model = _model_of(given.model)
        predicted = _prediction_of(model, given)
        account = predicted(given.batch, given.length)
        fits = _fits(model, predicted, given) if given.fits else ""
    except Exception as error:  # noqa: BLE001 # a model raises anything for values that it does not expect
        parser.error(printable(f"{given.model}: {type(error).__name__}: {error}"))
    account.show()
    account.to_json(given.json)
    if given.html:
        account.save(given.html)
    budget = f", of {format_bytes(given.budget)}" if given.budget else ""
    print(f"Bytes that are needed: {format_bytes(_needed(account))}{budget}. {fits}")
    return int(_needed(account) > (given.budget or float("inf")))


def _model_of(path: Path) -> Any:
    """Builds a model on the meta device. Nothing is downloaded, and code that a configuration names is not run."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = import_module("transformers")
    text, is_code = path.read_text(encoding="utf-8"), re.compile(CODE).fullmatch
    values = json.loads(text, object_hook=lambda each: {key: each[key] for key in each if not is_code(key)})
    config = transformers.AutoConfig.for_model(**values)
    name = str((values.get("architectures") or [""])[0])
    kind = getattr(transformers, name) if re.search("For|LMHead", name) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise TypeError("architectures names no model with a loss, such as BertForMaskedLM")
    with torch.device("meta"):
        return kind(config)


def _prediction_of(model: Any, given: argparse.Namespace) -> Callable[[int, int], Account]:
    """Returns a function that predicts a training step of so many rows, of so many tokens each."""
    model.to(getattr(torch, given.dtype)).train()
    if given.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items()}
    optimizer = kinds[given.optimizer](model.parameters())

    def predicted(rows: int, tokens: int) -> Account:
        ids = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
        labels = ids[:, 0] if type(model).__name__.endswith("ForSequenceClassification") else ids

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(given.device, torch.bfloat16, enabled=given.autocast):
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()

        return predict(step, model, optimizer, device=given.device)

    return predicted


def _needed(account: Account) -> int:
    """Returns the bytes that a GPU's allocator reserves for a step, or the peak on a CPU."""
    return account.ledger.reserved or account.peak_bytes


def _fits(model: Any, predicted: Callable[[int, int], Account], given: argparse.Namespace) -> str:
    """Names the largest batch of that length, and the largest length of that batch, which need few enough bytes."""
    stash = predicted(given.batch, given.length).ledger.stashed  # which grows as much as the batch, or more
    highest = given.fits * given.batch * given.length // stash
    positions = getattr(model.config, "max_position_embeddings", None) or highest
    rows, tokens = range(1, highest // given.length + 1), range(1, min(highest // given.batch, positions) + 1)
    most_rows = bisect_right(rows, given.fits, key=lambda number: _needed(predicted(number, given.length)))
    most_tokens = bisect_right(tokens, given.fits, key=lambda number: _needed(predicted(given.batch, number)))
    most = f"{most_rows} rows of {given.length} tokens, or {given.batch} rows of {most_tokens} tokens"
    return f"{format_bytes(given.fits)} hold {most}."


if __name__ == "__main__":
    if sys.argv[1:2] == ["predict"]:
        sys.exit(run_prediction(sys.argv[2:]))
    run_script(sys.argv[1:])
