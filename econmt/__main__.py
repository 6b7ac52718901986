"""``python -m econmt``: the same as the ``econmt`` command."""

from __future__ import annotations

from econmt.cli.main import main

if __name__ == "__main__":
    main()
