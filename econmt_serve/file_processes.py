"""Processes in which files are read and written, so that the server answers others meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from econmt_serve.file_worker import MOST_SECONDS, FileTask
from econmt_serve.settings import Refused, Stopping
from econmt_serve.text.passages import Hypothesis

_AT_ONCE = 2
"""Number of processes at once; other files wait."""
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from econmt_serve.file_worker import main; main()"
"""Program of a process, which imports from the same folders as the server."""


class FileProcesses:
    """Processes of one server; those of a client that leaves are ended when the method's task is cancelled."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._reading: set[asyncio.subprocess.Process] = set()
        self._writing: set[asyncio.subprocess.Process] = set()
        self._reads = self._writes = True

    def stop(self, *, writing: bool) -> None:
        """Ends the processes that read files, with ``writing`` also those that write them, and starts no others."""
        self._reads, self._writes = False, self._writes and not writing
        for process in (*self._reading, *(self._writing if writing else ())):
            process.kill()

    async def read(self, task: FileTask, content: bytes) -> list[tuple[str, bool]]:
        """Returns the sentences of a file, each with True if it has marks.

        Raises:
            Refused: the file cannot be read, or takes too much memory or time; or the server is stopping.
        """
        result, _ = await self._run(task, content)
        return [(text, marked) for text, marked in result]

    async def write(
        self, task: FileTask, content: bytes, translations: Sequence[Hypothesis]
    ) -> tuple[bytes, str]:
        """Returns a file with the translations of its sentences, and its content type; raises as :meth:`read`."""
        content_type, written = await self._run(task._replace(translations=translations), content)
        return written, content_type

    async def _run(self, task: FileTask, content: bytes) -> tuple[Any, bytes]:
        processes = self._reading if task.translations is None else self._writing
        async with self._turns:
            self._check_stopping(task)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _PROGRAM, *sys.path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the server's to handle
            )
            processes.add(process)
            try:
                head = json.dumps(task._asdict()).encode()
                output, _ = await process.communicate(head + b"\n" + content)
            finally:
                processes.discard(process)
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode != 0:
            self._check_stopping(task)
            raise _failure(process.returncode)
        line, _, written = output.partition(b"\n")
        answer = json.loads(line)
        if answer["refusal"] is not None:
            raise Refused(*answer["refusal"])
        return answer["result"], written

    def _check_stopping(self, task: FileTask) -> None:
        if not (self._reads if task.translations is None else self._writes):
            raise Stopping


def _failure(code: int | None) -> Refused:
    """Returns the error of a file whose process ended with an exit code other than 0."""
    if code == -signal.SIGXCPU:
        return Refused(413, f"the file takes more than {MOST_SECONDS} s to be read; send parts")
    if code == -signal.SIGKILL:
        return Refused(503, "the server has no memory left for this; ask for less at a time", 5)
    return Refused(500, f"this is a bug in econmt: reading a file ended with code {code}")
