"""Runs ``econmt`` commands and the project's scripts in forks of one process that has imported everything already.

A page of the documentation has dozens of commands, each of which would import torch anew: two seconds of a core. The
client, which stands on the ``PATH`` under the name ``econmt`` or ``python``, hands over its arguments, environment,
folder and standard streams; a fork of the server becomes that command, and the client leaves with its exit code.

    python fork_server.py SOCKET
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

CLIENT = """\
import array, json, os, signal, socket, struct, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
connection = socket.socket(socket.AF_UNIX)
connection.connect({socket!r})
signal.signal(signal.SIGTERM, lambda *_: connection.shutdown(socket.SHUT_WR))
words = [{program!r}, *sys.argv[1:]]
request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
streams = array.array("i", [0, 1, 2])
connection.sendmsg([struct.pack("I", len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
connection.sendall(request)
answer = connection.recv(4)
sys.exit(struct.unpack("i", answer)[0] if len(answer) == 4 else 99)
"""
"""The program of a client, to be formatted with the path of the server's socket and the name of its program."""

PRELOADED = (
    *("econmt.api.interface", "econmt.cli.bench", "econmt.cli.info", "econmt.cli.main"),
    *("econmt.cli.profile", "econmt.cli.standard_streams", "econmt.cli.train", "econmt.cli.translate"),
    *("econmt.estimate.report", "econmt.training.run", "matplotlib.figure", "numpy.random", "PIL.features"),
    *("PIL.JpegImagePlugin", "PIL.PpmImagePlugin", "rich._emoji_codes", "sacrebleu", "scripts.bench.frame"),
    *("scripts.bench.language_model", "scripts.bench.lstm", "scripts.bench.memory"),
    *("scripts.bench.memory_task", "scripts.bench.parallel", "scripts.bench.scan", "sentencepiece"),
    *("sympy", "torch._dynamo", "torch.utils.tensorboard"),
)
"""Modules that commands would import, slowly, one after the other."""


def serve(path: str) -> NoReturn:
    """Answers clients until the process is ended."""
    for name in PRELOADED:
        __import__(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(connection)
        connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    """Forks once more: the child becomes the command, the parent sends its exit code.

    A client that is told to end, or is killed, tells the command to end.
    """
    head, streams, _, _ = socket.recv_fds(connection, 4, 3)
    (size,) = struct.unpack("I", head)
    request = b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    words, folder, environment = json.loads(request)
    child = os.fork()
    if child == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _become(words)
    for stream in streams:
        os.close(stream)
    if connection in select.select([connection, os.pidfd_open(child)], [], [])[0]:
        os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(struct.pack("i", code if code >= 0 else 128 - code))
    os._exit(0)


def _forked_python() -> str:
    """The path of the program ``python`` that is a client."""
    return str(Path(os.environ["PATH"].partition(os.pathsep)[0]) / "python")


def _become(words: Sequence[str]) -> NoReturn:
    code = 70
    try:
        if words[0] == "python":  # -m MODULE
            sys.argv = list(words[2:])
            sys.path.insert(0, str(Path(__file__).parents[2]))
            if words[2] == "scripts.bench":  # its processes are forks, too
                sys.executable = _forked_python()
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
            code = 0
        else:
            from econmt.cli.main import main

            if words[1:2] == ["distill"]:  # which times models in processes of their own
                sys.executable = _forked_python()
            sys.argv = list(words)
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
