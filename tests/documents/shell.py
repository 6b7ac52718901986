"""A folder in which the documentation's commands run as a reader would run them, with small models."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from tests.conftest import PATIENCE, ROOT, econmt_environment
from tests.documents import fork_server, tiny


class Shell:
    """Runs shell commands in which ``econmt`` and ``python -m scripts.*`` are those of this checkout, made small.

    Programs are started by a fork; their arguments are changed by ``tiny.shrink`` and ``tiny.shrink_script``.

    Args:
        folder: Where the server's socket, the programs on the ``PATH``, the text and the cache lie.
    """

    def __init__(self, folder: Path) -> None:
        self._programs = folder / "bin"
        self._programs.mkdir(parents=True)
        self._socket = str(folder / "s")
        data = folder / "data"
        tiny.write_data(data)
        self.environment = econmt_environment(
            {
                "ECONMT_DATA": str(data),
                "PATH": os.pathsep.join(
                    [str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]]
                ),
                "HOME": str(folder),
                "PYTHONWARNINGS": "ignore",
                "TORCHDYNAMO_DISABLE": "1",  # compiling takes minutes, and has tests of its own
            }
        )
        command = [sys.executable, fork_server.__file__, self._socket]
        options = {"cwd": folder, "text": True, "start_new_session": True}
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, env=self.environment, **options)
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"
        self._write_program("econmt", "shrink", "True")
        self._write_program(
            "python",
            "shrink_script",
            "sys.argv[1] == '-m' and sys.argv[2].partition('.')[0] in ('econmt', 'scripts')",
        )
        self._write("taskset", '#!/bin/sh\nshift 2\nexec "$@"\n')  # as if the machine had all cores
        (self._programs / "activate").touch()

    def _write_program(self, name: str, shrink: str, forked: str) -> None:
        """Writes a program that becomes a fork of the server where ``forked`` is true, else the real one."""
        client = fork_server.CLIENT.format(socket=self._socket, program=name)
        self._write(
            name,
            f"#!{sys.executable} -SE\nimport os, sys\nif not ({forked}):\n"
            f"    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
            f"sys.path.insert(0, {str(ROOT)!r})\nfrom tests.documents.tiny import {shrink}\n"
            f"sys.argv[1:] = {shrink}(sys.argv[1:])\n{client}",
        )

    def _write(self, name: str, text: str) -> None:
        program = self._programs / name
        program.write_text(text)
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
            timeout=PATIENCE,
            check=False,
        )

    def serve(self, command: str, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
        """Starts ``econmt serve`` at any free port; returns when it listens, with the port."""
        process = subprocess.Popen(
            [*shlex.split(command, comments=True), "--port", "0"],
            executable=str(self._programs / "econmt"),
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        said = []
        for line in process.stderr:
            if found := re.search(rb" listening on http://.*:(\d+)/", line):
                return process, int(found[1])
            said.append(line.decode())
        raise AssertionError("".join(said))

    def close(self) -> None:
        """Ends the server and every command that it still runs."""
        os.killpg(self._server.pid, 9)
        self._server.communicate()
        shutil.rmtree(self._programs)
