"""The ``econmt`` command; ``python -m econmt`` is the same."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main() -> NoReturn:
    """Runs the command line; Ctrl-C while it is imported leaves as quietly as later."""
    try:
        from econmt.cli import main as command

        command.main()
    except KeyboardInterrupt:
        code: object = INTERRUPTED
    except SystemExit as end:
        code = end.code
    if code == INTERRUPTED:
        # Python kills itself by SIGINT at its end if Ctrl-C ever met text that is being executed, as in the making of a
        # namedtuple, though it was handled (_Py_UnhandledKeyboardInterrupt).
        atexit._run_exitfuncs()
        os._exit(INTERRUPTED)
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
