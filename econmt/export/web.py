"""Pages that translate in the browser: the files beside a model, and all of them as one file."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path
from typing import IO

from econmt.checkpoint.tensor_files import write_text

_NO_FILES = "const FILES = {};"
_SCRIPT = '<script type="module" src="page.js"></script>'


def add_page(source: Path, folder: Path) -> None:
    """Copies the page from ``source`` beside a model; offline.js lists all files, which browsers keep.

    Args:
        source: Folder of the page. folder: Folder of the model.
    """
    for path in source.iterdir():
        shutil.copyfile(path, folder / path.name)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    offline = folder / "offline.js"
    text = offline.read_text(encoding="utf-8")
    assert _NO_FILES in text
    write_text(offline, text.replace(_NO_FILES, f"const FILES = {json.dumps(files, indent=2)};"))


def write_page(stream: IO[bytes], folder: Path) -> None:
    """Writes a page that holds the files of a folder, and opens from the disk."""
    page, script = ((folder / name).read_text(encoding="utf-8") for name in ("index.html", "page.js"))
    assert _SCRIPT in page
    held = [
        f'<script type="text/plain" data-file="{path.name}">{base64.b64encode(path.read_bytes()).decode()}</script>'
        for path in sorted(folder.iterdir())
        if path.name not in ("index.html", "page.js", "offline.js")
    ]
    page = page.replace("connect-src 'self'; ", "").replace("'self'", "'unsafe-inline' blob:")
    page = page.replace(_SCRIPT, "\n".join([*held, f'<script type="module">\n{script}</script>']))
    stream.write(page.encode())
