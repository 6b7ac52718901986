"""Downloads models from the Hugging Face Hub (``hf://OWNER/NAME``) with huggingface_hub (the extra ``hub``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from econmt.errors import InputError

_NAME = re.compile(r"hf:/+(?P<id>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")
FILES = ("recipe.yaml", "params.best.safetensors", "subwords*.model", "subwords*.json", "vocab*.txt")
"""Patterns of the files to download: all that translation needs."""


def local_model(name: Path | str, files: Sequence[str] = FILES) -> Path:
    """Returns a model's folder: the given one, or a copy in huggingface_hub's cache of ``hf://OWNER/NAME[@REVISION]``.

    ``files`` are the patterns of the files that are downloaded.

    Raises:
        InputError: The name is invalid, huggingface_hub is not installed, or the download fails.
    """
    if "\0" in str(name):
        raise InputError(f"{name}: no folder's name has a NUL character; remove it")
    if not str(name).startswith("hf:/"):
        return Path(name)
    match = _NAME.fullmatch(str(name))
    shown = re.sub("^hf:/+", "hf://", str(name))
    if match is None:
        raise InputError(
            f"{shown}: not the name of a model of the Hub; use hf://OWNER/NAME or hf://OWNER/NAME@REVISION"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise InputError(
            f"{shown}: models of the Hub need huggingface_hub, which is not installed; run pip install "
            "huggingface_hub, or use a model folder"
        ) from None
    try:
        return Path(snapshot_download(match["id"], revision=match["revision"], allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise InputError(
            f"{shown}: cannot be downloaded: {reason[0] if reason else type(error).__name__}"
        ) from None
