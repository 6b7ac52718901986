"""The ``econmt`` command; ``python -m econmt`` is the same."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line; Ctrl-C while it is imported leaves as quietly as later."""
    try:
        from econmt.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command.main()


if __name__ == "__main__":
    main()
