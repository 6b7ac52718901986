"""A folder in which the documentation's commands run as a reader would run them, with small models."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from tests.conftest import ROOT, econmt_environment
from tests.documents import fork_server, tiny

TIMEOUT = 240
"""Seconds that a command may take."""


class Shell:
    """Runs shell commands in which ``econmt`` is this checkout, started by a fork and shrunk by ``tiny.shrink``.

    Args:
        folder: Where the server's socket, the programs on the ``PATH``, the text and the cache lie.
    """

    def __init__(self, folder: Path) -> None:
        self._programs = folder / "bin"
        self._programs.mkdir(parents=True)
        self._socket = str(folder / "s")
        data = folder / "data"
        tiny.write_data(data)
        (folder / ".cache" / "econmt").mkdir(parents=True)
        (folder / ".cache" / "econmt" / "data").symlink_to(data)
        self.environment = econmt_environment(
            {
                "ECONMT_DATA": str(data),
                "PATH": os.pathsep.join(
                    [str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]]
                ),
                "HOME": str(folder),
                "PYTHONWARNINGS": "ignore",
            }
        )
        self._server = subprocess.Popen(
            [sys.executable, fork_server.__file__, self._socket],
            stdout=subprocess.PIPE,
            env=self.environment,
            cwd=folder,
            text=True,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"
        self._write_program("econmt")
        (self._programs / "activate").touch()

    def _write_program(self, name: str) -> None:
        shrink = f"sys.path.insert(0, {str(ROOT)!r})\nfrom tests.documents.tiny import shrink\n"
        client = fork_server.CLIENT.format(socket=self._socket, program=name)
        program = self._programs / name
        program.write_text(
            f"#!{sys.executable} -SE\nimport sys\n{shrink}sys.argv[1:] = shrink(sys.argv[1:])\n{client}"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run(self, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Runs a command by bash in ``folder``; a pipe fails with its first part that fails."""
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )

    def serve(self, command: str, folder: Path, port: int) -> subprocess.Popen[bytes]:
        """Starts ``econmt serve`` and returns when it accepts connections."""
        process = subprocess.Popen(
            [sys.executable, "-m", *shlex.split(command, comments=True), "--port", str(port)],
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for _ in range(600):
            with closing(socket.socket()) as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    return process
            if process.poll() is not None:
                break
            time.sleep(0.1)
        process.kill()
        raise AssertionError(process.communicate()[1].decode())

    def close(self) -> None:
        """Ends the server and every command that it still runs."""
        os.killpg(self._server.pid, 9)
        self._server.communicate()
        shutil.rmtree(self._programs)
