"""Entry point of the ``econmt`` command and of ``python -m econmt``."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C (128 + SIGINT)."""


def main() -> NoReturn:
    """Runs the command line; Ctrl-C exits without a traceback, also during imports."""
    try:
        from econmt.cli import main as command

        command.main()
    except KeyboardInterrupt:
        code: object = INTERRUPTED
    except SystemExit as end:
        code = end.code
    if code == INTERRUPTED:
        # If Ctrl-C interrupted exec() of source text (namedtuple uses it), Python kills itself with SIGINT at exit even
        # though the exception was handled (_Py_UnhandledKeyboardInterrupt). os._exit avoids that.
        atexit._run_exitfuncs()
        os._exit(INTERRUPTED)
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
