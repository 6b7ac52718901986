"""Program of a process that reads one file, or writes it with its translations.

The server starts such a process for each file, see :mod:`econmt_serve.file_processes`: a file is made by a stranger,
and reading one must neither stop the server nor take its memory. Standard input holds a line of JSON, which is a
:class:`FileTask`, and the file. Standard output gets a line of JSON, and the translated file.

This module and what it imports must not import torch, whose start takes seconds.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from econmt_serve.files import read_file
from econmt_serve.settings import Refused
from econmt_serve.text.division import division_of
from econmt_serve.text.passages import Hypothesis

MOST_BYTES = 1 << 30
"""Maximum size of the process's address space."""
MOST_SECONDS = 10
"""Maximum processor time of the process, after which the system ends it by SIGXCPU."""

_NICE = 5
"""Priority of the process below the server's, which answers others meanwhile."""


class FileTask(NamedTuple):
    """Task of a process.

    Attributes:
        content_type: content type of the file.
        languages: source and target language by whose rules paragraphs are split into sentences; None: they are not.
        most_characters: maximum number of characters of the file's sentences.
        translations: translations of all sentences, to write; None: the sentences are read.
    """

    content_type: str
    languages: tuple[str, str] | None
    most_characters: int
    translations: Sequence[Hypothesis] | None = None

    def done(self, content: bytes) -> tuple[Any, bytes]:
        """Returns the sentences, each with True if it has marks, or the content type and the translated file.

        Raises:
            Refused: the file cannot be read.
        """
        how = division_of(self.languages)
        file = read_file(content, self.content_type, how, self.most_characters)
        if self.translations is None:
            return [(each.text, bool(each.marks)) for each in file.sentences], b""
        written, content_type = file.written(self.translations)
        return content_type, written


def main() -> None:
    """Does the task on standard input."""
    for name, most in ((resource.RLIMIT_AS, MOST_BYTES), (resource.RLIMIT_CPU, MOST_SECONDS)):
        hard = resource.getrlimit(name)[1]
        resource.setrlimit(name, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    os.nice(_NICE)
    task = FileTask(**json.loads(sys.stdin.buffer.readline()))
    refusal: tuple[int, str] | None = None
    result, written = None, b""
    try:
        result, written = task.done(sys.stdin.buffer.read())
    except Refused as error:
        refusal = error.status, str(error)
    except MemoryError:
        refusal = 413, f"the file takes more than {MOST_BYTES >> 20:,} MiB of memory to be read; send parts"
    answer = json.dumps({"refusal": refusal, "result": result})
    sys.stdout.buffer.write(answer.encode() + b"\n" + written)
    sys.stdout.buffer.flush()
