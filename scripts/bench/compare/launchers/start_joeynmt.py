"""Starts Joey NMT, whose training log then also tells how many target tokens were trained on.

The arguments are those of ``python -m joeynmt``. Its own log tells tokens a second by a clock that goes on while its
process is stopped for another's turn; so its count is printed beside it. Nothing else is changed.
"""

from __future__ import annotations

import sys

from joeynmt.__main__ import main as joeynmt
from joeynmt.training import TrainManager


def main() -> None:
    log = TrainManager._log_scores

    def counting_log(self, epoch, seconds, tokens_before, *others):  # type: ignore[no-untyped-def]
        tokens = self.stats.total_tokens - tokens_before
        print(f"update {self.stats.steps}: {tokens} target tokens", flush=True)
        return log(self, epoch, seconds, tokens_before, *others)

    TrainManager._log_scores = counting_log
    sys.argv[0] = "joeynmt"
    joeynmt()


if __name__ == "__main__":
    main()
