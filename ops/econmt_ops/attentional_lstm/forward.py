"""Forward pass of the recomputing attentional decoder.

In each step the layers write their output (see `layers`); one product gives the query and the
output's share of o, and one attention kernel computes o, or the context of which `EagerSteps.output_forward` makes o.
"""

from __future__ import annotations

from econmt_ops.attentional_lstm import persistent
from econmt_ops.attentional_lstm.layers import ForwardCells, ForwardLSTM
from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result, empty_result
from econmt_ops.backends.protocol import CoverageStep, OutputStep
from econmt_ops.core.loops import steps_of


def forward(problem: AttentionalProblem, keep: bool) -> Result:
    """Runs all steps of a call; ``keep``: a backward pass will follow."""
    result = empty_result(problem.call, keep)
    sizes = persistent.sizes_of(problem)
    steps: ForwardSteps | persistent.ForwardBlocks
    if sizes is None:
        steps = ForwardSteps(problem, result, keep)
    else:
        steps = persistent.ForwardBlocks(problem, sizes, result, keep)
    for number in steps_of(range(len(problem.blocks))):
        begin, end = problem.blocks[number]
        if keep and not (problem.is_lstm and problem.keeps("cells")):
            for index, state in enumerate(steps.others):
                result.c[index, number] = state
        steps.run(begin, end)
    steps.finish()
    return result


class ForwardSteps:
    """Steps of a forward pass, one after the other.

    Attributes:
        others: States of the layers beside h before the next step, (B, H) each.
    """

    def __init__(self, problem: AttentionalProblem, result: Result, keep: bool) -> None:
        self.problem, self.result = problem, result
        space, batch = problem.inputs.new_empty, problem.batch
        self.attention = problem.attention(problem.projected())
        # One product gives query and stack's share of o; without query weights, that share alone.
        matrix = problem.both()
        self.combination = problem.product(matrix, problem.both_bias())
        asked = problem.size if problem.query is None else 0
        self.both = space(batch, asked + len(matrix))
        self.combined = self.both[:, asked:]
        top = self.both[:, :asked] if asked else space(batch, problem.hidden)
        self.layers = (ForwardLSTM if problem.is_lstm else ForwardCells)(problem, result, keep, top)
        self.others = self.layers.others
        self.layers.fed.copy_(problem.call.first_output)
        self.context = None if problem.squashes else space(batch, problem.width_of_share)
        self.coverage = result.last_coverage
        if problem.call.first_coverage is not None:
            self.coverage.copy_(problem.call.first_coverage)
        # Kernels read the coverage before a step while they write that after it.
        self._spare = None if keep else self.coverage.clone()

    def run(self, begin: int, end: int) -> None:
        """Runs steps begin to end."""
        self.layers.begin(begin, end)
        for position in steps_of(range(begin, end)):
            self.layers.step(position - begin, position)
            self.combination.into(self.combined, self.layers.top)
            self._output(position)

    def _output(self, position: int) -> None:
        """Computes attention and o of a step, and the coverage after it."""
        problem, result = self.problem, self.result
        share, state = problem.parts_of_both(self.both, problem.size)
        covered = None
        if problem.call.first_coverage is not None:
            after = result.coverage[position] if self._spare is None else self._spare
            covered = CoverageStep(self.coverage, after, state)
            if self._spare is not None:
                self._spare = self.coverage
            self.coverage = after
        outputs, weights = (result.outputs[position], self.layers.fed), result.attention[position]
        made = outputs if self.context is None else (self.context,)
        self.attention.forward(self.both[:, : problem.size + problem.width_of_share], made, weights, covered)
        if self.context is not None:
            step = OutputStep(share, self.context, outputs[0], problem.context_bias, problem.norm)
            problem.run.output_forward(step, outputs)

    def finish(self) -> None:
        """Writes the state after the last step."""
        self.layers.finish()
        if self.coverage is not self.result.last_coverage:
            self.result.last_coverage.copy_(self.coverage)
