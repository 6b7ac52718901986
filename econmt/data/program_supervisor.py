"""Runs a program and ends it with the process that wanted it; executed as a file, in a session of its own.

The starting process holds the other ends of two pipes. On the first, ``alive``, nothing is ever written: it closes when
that process ends, even by SIGKILL, and then the whole process group ends. That needs no polling, and reaches the
programs that the program has started, which Linux's signal on a parent's death does not. The second, ``status``, gets
the exit code of the program, negative for a signal, or the reason why it could not be started.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys


def end_with_starter(alive: int) -> None:
    """Ends the process group, this process included, when the starting process does."""
    os.read(alive, 1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Runs ``program_supervisor.py ALIVE STATUS PROGRAM ARGUMENTS``."""
    alive, status, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for descriptor in (alive, status):
        os.set_inheritable(descriptor, False)
    # A program may send these to its process group.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    _thread.start_new_thread(end_with_starter, (alive,))
    try:
        # Python ignores these, and programs would inherit that.
        child = os.posix_spawnp(words[0], words, os.environ, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])
    except OSError as error:
        os.write(status, f"cannot be started: {error.strerror}".encode())
    else:
        os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    while True:  # until the starting process has read the output
        signal.pause()


if __name__ == "__main__":
    main()
