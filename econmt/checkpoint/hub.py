"""Models of the Hugging Face Hub, ``hf://OWNER/NAME`` for a folder, fetched by huggingface_hub (the extra ``hub``)."""

from __future__ import annotations

import re
from pathlib import Path

from econmt.errors import InputError

_NAME = re.compile(r"hf:/+(?P<id>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")
FILES = ("recipe.yaml", "params.best.safetensors", "subwords*.model", "vocab*.txt")
"""Files to download: all that translation needs."""


def is_of_hub(name: Path | str) -> bool:
    """Returns True if the name is that of a model on the Hub."""
    return str(name).startswith("hf:/")


def local_model(name: Path | str) -> Path:
    """The folder of a model: its own, or a copy in huggingface_hub's cache of one of the Hub.

    Args:
        name: a folder, or ``hf://OWNER/NAME``, or ``hf://OWNER/NAME@REVISION``.

    Raises:
        InputError: the name is none of the Hub's, huggingface_hub is not installed, or the model cannot be fetched.
    """
    if not is_of_hub(name):
        return Path(name)
    match = _NAME.fullmatch(str(name))
    shown = re.sub("^hf:/+", "hf://", str(name))
    if match is None:
        raise InputError(f"{shown}: a model of the Hub is named hf://OWNER/NAME, or hf://OWNER/NAME@REVISION")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise InputError(
            f"{shown}: models of the Hub are fetched by huggingface_hub, which is not installed; pip install "
            "huggingface_hub, or give a model folder"
        ) from None
    try:
        return Path(snapshot_download(match["id"], revision=match["revision"], allow_patterns=list(FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise InputError(
            f"{shown}: cannot be fetched: {reason[0] if reason else type(error).__name__}"
        ) from None
