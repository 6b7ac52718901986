"""Starts econmt, whose training log then also tells how many target tokens were trained on, and when training began.

The arguments are those of the ``econmt`` command. econmt's own log tells tokens a second by a clock that goes on while
its process is stopped for another's turn; so its count is printed beside it. Nothing else is changed.
"""

from __future__ import annotations

import sys

from econmt.cli.main import main as econmt
from econmt.training.progress import Figures, Progress
from econmt.training.trainer import Trainer


def main() -> None:
    figures, begin = Trainer._figures, Trainer._begin

    def counting_figures(self: Trainer, update: int) -> Figures:
        print(f"update {update}: {self.state.since_log.tokens} target tokens", flush=True)
        return figures(self, update)

    def telling_begin(self: Trainer, progress: Progress) -> None:
        self._tick()
        # Compiling kernels for the first update counts, as with toolkits that compile or load them when they are used.
        print(f"first update begins: {self.state.seconds:.2f} s", flush=True)
        begin(self, progress)

    Trainer._figures = counting_figures  # type: ignore[method-assign]
    Trainer._begin = telling_begin  # type: ignore[method-assign]
    sys.argv[0] = "econmt"
    econmt()


if __name__ == "__main__":
    main()
