# ruff: noqa: I002, UP  Python 3.6 runs this file
"""Trains with Sockeye 1.18, whose log then also tells how many target tokens were trained on.

The first argument is the number of updates between two lines of the log, the others are those of ``sockeye-train``.
Sockeye itself counts padded source positions; here the tokens of a batch are its labels other than padding, which is
what the other toolkits count. Nothing else is changed.
"""

import sys

from sockeye import train  # first: it wants to be there before MXNet is

from sockeye import constants, training  # isort: skip


def main():
    constants.MEASURE_SPEED_EVERY = int(sys.argv.pop(1))
    step, report = training.EarlyStoppingTrainer._step, training.Speedometer.__call__
    tokens = [0]

    def counting_step(self, model, batch, *others):
        tokens[0] += int((batch.label[0].asnumpy() != constants.PAD_ID).sum())
        return step(self, model, batch, *others)

    def counting_report(self, epoch, batches, *others):
        report(self, epoch, batches, *others)
        if batches % self.frequency == 0:
            print(f"update {batches}: {tokens[0]} target tokens", flush=True)
            tokens[0] = 0

    training.EarlyStoppingTrainer._step = counting_step
    training.Speedometer.__call__ = counting_report
    sys.argv[0] = "sockeye-train"
    train.main()


if __name__ == "__main__":
    main()
