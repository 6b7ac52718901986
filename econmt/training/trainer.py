"""The training loop: updates, checkpoints, stopping on signals, and smaller micro-batches when memory runs out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.budget.run_budget import Budget, divide
from econmt.checkpoint.checkpoints import Saved, load_parameters, load_saved, prove, save_commit, saving
from econmt.checkpoint.folder import Commit, ModelFolder
from econmt.checkpoint.recovery import finish_commit
from econmt.checkpoint.state import Meter, TrainingState, random_states, restore_random_states
from econmt.checkpoint.tensor_files import read_tensors
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.store import PreparedData
from econmt.engine.devices import (
    give_back_library_pages,
    give_back_memory,
    is_out_of_memory,
    peak_memory,
    trims_batches,
)
from econmt.engine.graphs import GraphedStep
from econmt.engine.outside_memory import outside_meter
from econmt.engine.parameters import in_float32
from econmt.engine.step import OtherRankError, StepResult, TrainingStep
from econmt.errors import InputError, TrainingError
from econmt.model import Implementations
from econmt.training.decisions import (
    Pace,
    RunAverage,
    Schedule,
    end_reason,
    judge_checkpoint,
    outlook,
    seconds_left,
    share_done,
)
from econmt.training.hooks import Hook
from econmt.training.interrupts import Interrupted, Interrupts
from econmt.training.progress import Figures, Progress
from econmt.training.ranks import Ranks
from econmt.training.update_metrics import LossScaling, MetricsQueue, UpdateMetrics, not_finite, out_of_memory
from econmt.training.validation import Abandoned, Validation, report_checkpoint, validate

_UPDATES_BETWEEN_TRIMS = 5


class TrainingResult(NamedTuple):
    """Result of a run: the reason why it ended, and its best checkpoint."""

    reason: str
    update: int
    best_update: int
    metrics: list[dict[str, float]]


class Trainer:
    """Training loop of one process."""

    def __init__(
        self,
        step: TrainingStep,
        folder: ModelFolder,
        prepared: PreparedData,
        state: TrainingState,
        began: float | None = None,
        hook: Hook | None = None,
    ) -> None:
        task, model, precision = step.task, step.model, step.precision
        training = task.recipe.training
        self.task, self.recipe = task, task.recipe
        self.folder, self.prepared, self.state, self.hook = folder, prepared, state, hook
        self.step, self.model, self.optimizer = step, model, step.optimizer
        self.device, self.communicator = step.device, step.communicator
        self.parameters = dict(model.named_parameters())
        size = task.recipe.model.hidden_size
        self.schedule = Schedule(training.schedule, training.optimizer.learning_rate, size)
        self.communicator.broadcast(list(self.parameters.values()))
        self.batches = task.batches(prepared)
        self.budget = Budget(
            task, prepared, self.batches, step.device, precision, self.parameters.values(), step.communicator
        )
        self._trims = trims_batches(training.trim_batches, step.device)
        self._graphed: GraphedStep | None = None
        self._average = RunAverage(training.averaging, self.optimizer, training.checkpoint_interval)
        self._average.begin(state)
        self._metrics = MetricsQueue(step.device, step.communicator)
        self._scaling = LossScaling(step.loss_scale)
        self._ranks = Ranks(step)
        self._saved = state.update
        self._pace = Pace()
        self._clock = time.monotonic() if began is None else began

    def load(self, commit: Commit) -> list[str]:
        """Resumes from a saved state; returns messages about anything that could not be restored."""
        saved = load_saved(self.folder, commit)
        state_folder = str(self.folder.state(commit))
        notes = []
        self.state, self._saved = saved.state, saved.state.update
        with in_float32(self.model.parameters()):
            load_parameters(self.model, saved.parameters, state_folder)
        if saved.optimizer_name == self.recipe.training.optimizer.name:
            self.step.load_optimizer_tensors(saved.optimizer, state_folder)
        else:
            self.optimizer.state.clear()  # includes a mean that was never filled
            notes.append(f"the saved optimizer is {saved.optimizer_name}; its state is not used")
        notes += self._average.restore(self.state)
        if not self.step.set_carried(saved.carried):
            notes.append(
                "the batch size has changed: each row starts without the state of its preceding text"
            )
        self.schedule.load_state_dict(saved.state.schedule)
        self.batches.load_state_dict(saved.state.data)
        self._scaling.restore(self.state)
        restore_random_states(saved.state.random)
        self.step.set_random_state(torch.tensor(saved.state.random.get("dropout", []), dtype=torch.int64))
        return notes

    def run(self, progress: Progress, interrupts: Interrupts) -> TrainingResult:
        """Trains until a limit, early stopping or an interruption.

        Raises:
            Interrupted: SIGTERM or Ctrl-C was received; everything is saved.
            TrainingError: The loss is not finite, or memory or disk are full.
        """
        with self.budget.enforced():
            self._begin(progress)
            while True:
                if self._ranks.should_stop(interrupts, self.state):
                    self._save_and_stop(interrupts)
                reason = None
                if self.state.update:  # also a run whose time is over has results
                    epoch, seconds = self.batches.epoch, self._ranks.seconds
                    reason = end_reason(self.recipe.training, self.state, epoch, seconds)
                interval_ends = self.state.update % self.recipe.training.checkpoint_interval == 0
                if self.state.update > self.state.last_checkpoint and (interval_ends or reason is not None):
                    self._checkpoint(progress, interrupts)
                elif reason is not None:
                    self._release_graphs()
                    return TrainingResult(
                        reason, self.state.update, self.state.best_update, self.state.metrics
                    )
                else:
                    self._update(progress)

    def _begin(self, progress: Progress) -> None:
        """Prepares CUDA graphs if training uses them, and checks that the largest batch fits the memory."""
        self.model.train()
        if self.device.type == "cuda" and self.recipe.training.in_graphs:
            self.budget.reserve_for_optimizer(self.optimizer)
            # If updates accumulate several (micro-)batches, each is captured as a graph of its own.
            plan, interval = self.budget.plan, self.recipe.training.update_interval
            several = interval > 1 or (plan is not None and plan.divides)
            most_rows = self._ranks.pad_to_largest(self.batches.shapes(), lambda: self.budget.plan)
            self._graphed = GraphedStep(self.step, several=several, note=progress.note, most_rows=most_rows)
        elif self.device.type == "cuda" and self.recipe.training.cuda_graphs == "auto":
            progress.note("training.optimizer.name rules out CUDA graphs")
        if self.device.type == "cuda" or self.budget.plan is not None:
            progress.doing("trying the largest batch" if self._graphed is None else "compiling kernels")
            self.rehearse()
        self._report_plan(progress)
        give_back_library_pages()
        self._tick()
        self._pace.seconds_per_update(self.state.seconds, self.state.update)

    def rehearse(self) -> None:
        """Computes the gradient of the largest batch and discards it, so that too little memory is noticed at once.

        With CUDA graphs its step is captured, which takes the same memory. With a memory budget it is the micro-batch
        with the largest predicted memory, which is divided further while it does not fit.

        Raises:
            TrainingError: Memory does not suffice.
        """
        with self._streams_preserved():
            reserved = self.budget.reserve_for_optimizer(self.optimizer)
            if self._graphed is None:
                self.gradient(self.budget.largest_batches())
            else:
                self._capture_largest(self._graphed)
            del reserved
        self.step.clear()

    def _capture_largest(self, graphed: GraphedStep) -> None:
        """Captures the largest batch; one process divides it further while it does not fit its plan."""
        while True:
            plan, largest = self.budget.plan, self.budget.largest_batches()[:1]
            ((origin, batch, implementations),) = self._shares(largest)
            try:
                if plan is not None and plan.divides:
                    graphed.accumulate()
                shapes = () if self._trims else self.budget.every_shape(self.state.update)
                too_large = graphed.warm_up(share[1:] for share in self._shares(shapes))
                if too_large and plan is None:  # a plan splits it further when it comes
                    raise TrainingError(self._out_of_memory(too_large[0]))
                return graphed.capture(batch, implementations)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if plan is None or len(batch.indices) == 1 or self.communicator.size > 1:
                    raise TrainingError(self._out_of_memory(batch)) from error
            self.budget.shrink(origin, len(batch.indices))  # its exception held the tensors of the failed run

    def _shares(
        self, batches: Iterable[AnyBatch], *, trims: bool = False
    ) -> list[tuple[AnyBatch, AnyBatch, Implementations]]:
        """Returns the parts of batches that this rank computes, each after its batch, with their implementations."""
        plan, otherwise, replicas = self.budget.plan, self.step.implementations, self.communicator.replicas
        return [
            (batch, self._ranks.share(part.trimmed() if trims else part), implementations)
            for batch in batches
            for part, implementations in divide(batch, plan, otherwise, replicas)
        ]

    def _release_graphs(self) -> None:
        """Releases the CUDA graphs on all ranks, as required before communicators are destroyed."""
        if self._graphed is not None:
            self._graphed.release()
            self._graphed = None

    def _update(self, progress: Progress) -> None:
        """Updates the parameters once, from ``update_interval`` batches."""
        training, began = self.recipe.training, time.monotonic()
        update = self.state.update + 1
        batches = [next(self.batches) for _ in range(training.update_interval)]
        tokens = sum(batch.target_tokens for batch in batches)
        rate = self.schedule.learning_rate(update) * sum(batch.rate for batch in batches) / len(batches)
        self.optimizer.set_learning_rate(rate)
        result = self.gradient(batches, updates=True)
        self._report_plan(progress)
        indices = [batch.indices.numpy() for batch in batches]
        for metrics in self._metrics.submit(update, result, tokens, indices):
            self._count(metrics)
        if self._graphed is None:
            self.step.update()
        self.state.update = update
        self._average.updated(self.state)
        self.state.target_tokens += tokens
        for meter in (self.state.since_log, self.state.since_checkpoint):
            meter.tokens += tokens
            meter.seconds += time.monotonic() - began
        self._tick()
        if update % _UPDATES_BETWEEN_TRIMS == 0:
            give_back_memory(self.device)
        if update % training.log_interval == 0:
            self._flush()
            progress.updates(self._figures(update))
            if update == training.log_interval:
                pace = self._pace.seconds_per_update(self.state.seconds, update)
                progress.note(outlook(self.recipe, self.batches.batches_per_epoch, pace))
            self._ranks.report_slow(progress)
            self.state.since_log = Meter()
        elif progress.is_live:
            progress.live(self._figures(update))
        else:
            progress.doing(f"training: update {update:,}")

    def gradient(self, batches: Sequence[AnyBatch], *, updates: bool = False) -> StepResult:
        """Computes the gradient of the loss per token, which the step's update clips and applies.

        CUDA graphs have applied the update, too. If memory is full and the memory budget's plan can split batches
        further, they are computed again in smaller parts. ``updates``: True if the step's update follows.

        Raises:
            TrainingError: Memory was full, and there is no plan, or nothing left to split.
        """
        self.step.overlaps = self.budget.plan is None
        restore, trims = None if self.budget.plan is None else self._snapshot(), updates and self._trims
        while True:
            origins, parts, implementations = zip(*self._shares(batches, trims=trims), strict=True)
            try:
                if self._graphed is not None:
                    return self._graphed(parts, implementations, sum(b.target_tokens for b in batches))
                moved = [part.to(self.device) for part in parts]
                return self.step.gradient(moved, self.step.tokens(batches), implementations, applies=updates)
            except OtherRankError as error:
                failed = error.number
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = self.step.agree(self.step.number or 0)
                if restore is None or self.step.is_partly_updated or len(parts[failed].indices) == 1:
                    raise TrainingError(self._out_of_memory(parts[failed])) from error
            assert restore is not None
            # The tensors of the failed step are released only now, after its exception.
            self.step.clear()
            self.budget.shrink(origins[failed], len(parts[failed].indices))
            restore()

    def _count(self, metrics: UpdateMetrics) -> None:
        if not metrics.finite:
            raise TrainingError(not_finite(metrics, self.prepared.train, self._last_good()))
        self._scaling.count(metrics, self.state, self._last_good())
        if not metrics.skipped:
            self.state.gradient_norm = metrics.gradient_norm
        self.state.since_log.loss += metrics.loss
        self.state.since_checkpoint.loss += metrics.loss

    def _flush(self) -> None:
        for metrics in self._metrics.flush():
            self._count(metrics)

    def _tick(self) -> None:
        now = time.monotonic()
        self.state.seconds += now - self._clock
        self._clock = now

    def _checkpoint(self, progress: Progress, interrupts: Interrupts) -> None:
        """Validates and saves a checkpoint; an interruption during validation discards it."""
        self._flush()
        self.step.clear()
        if self._graphed is not None and self.budget.plan is not None:
            self._graphed.release()  # the plan gives translating all of the budget
        try:
            with self._streams_preserved(), self._average.in_place(self.state):
                self.step.make_whole()
                result = validate(
                    self.step,
                    self.prepared,
                    self.budget.plan,
                    self.state.signature,
                    self.state.update,
                    stop=lambda: interrupts.pending,
                    say=progress.doing,
                    hook=self.hook,
                )
        except Abandoned:
            self._ranks.discard_answer()
            return
        except torch.cuda.OutOfMemoryError as error:
            raise TrainingError(
                f"out of memory on {self.device} for validation at update {self.state.update}; {self._last_good()}; "
                "lower decoding.batch_size or decoding.beam_size"
            ) from error
        state = self.state
        improved = judge_checkpoint(self.recipe.training, state, result.columns())
        new_signature = result.signature != state.signature
        state.signature = result.signature
        self._tick()
        state.metrics.append(self._row(result))
        state.last_checkpoint = state.update
        state.parameters_from = state.update
        state.since_checkpoint = Meter()
        goes_back = improved is not None and self.schedule.checkpoint(improved)
        notes = self._average.checkpoint(state)
        tensors = self._optimizer_tensors()
        best = self._best(tensors, progress) if goes_back else None
        if best is not None:
            state.parameters_from = state.best_regular
        self._save(tensors if best is None else best.optimizer, result)
        if best is not None:
            with in_float32(self.model.parameters()):
                load_parameters(self.model, best.parameters, self.folder.path)
            self.step.load_optimizer_tensors(best.optimizer, str(self.folder.path))
        for note in notes:
            progress.note(note)
        if new_signature:
            progress.note(f"BLEU signature {result.signature}")
        report_checkpoint(progress, result, state, goes_back=goes_back)

    def _best(self, current: dict[str, Tensor], progress: Progress) -> Saved:
        """Loads the best regular checkpoint; with ``current`` optimizer tensors if its own are of no use.

        They may be missing or damaged, or of another optimizer, with which the run began.
        """
        commit, name = Commit(self.state.best_regular, True), self.recipe.training.optimizer.name
        if self.folder.state(commit).is_dir():
            try:
                saved = load_saved(self.folder, commit)
                if saved.optimizer_name == name:
                    return saved
            except InputError as error:
                progress.note(f"the best checkpoint's optimizer state cannot be used: {error}")
        parameters, _ = read_tensors(self.folder.parameters(self.state.best_regular))
        return Saved(self.state, parameters, current, name)

    def _row(self, result: Validation) -> dict[str, float]:
        state, meter = self.state, self.state.since_checkpoint
        return {
            "update": state.update,
            "seconds": state.seconds,
            "target_tokens": state.target_tokens,
            "train_loss": meter.loss / meter.tokens,
            **result.columns(),
            "learning_rate": self.schedule.learning_rate(state.update),
            "target_tokens_per_second": meter.tokens / max(meter.seconds, 1e-9),
            "peak_memory_bytes": peak_memory(self.device),
            "epoch": self.batches.epoch,
            "gradient_norm": state.gradient_norm,
            **self._scaling.columns(state),
        }

    def _save(self, optimizer: Mapping[str, Tensor], result: Validation | None) -> None:
        """Saves a checkpoint with a validation's result, or without one the state between two checkpoints."""
        state, training = self.state, self.recipe.training
        state.schedule = self.schedule.state_dict()
        state.data = self.batches.state_dict()
        self._scaling.store(state)
        state.random = {**random_states(), "dropout": self.step.random_state().tolist()}
        self.budget.store(state)
        with self._average.in_place(self.state):
            self.step.make_whole()
        carried = self._ranks.carried(training.batch.size)
        saved = Saved(state, self.parameters, optimizer, training.optimizer.name, carried)

        def write() -> None:
            commit = Commit(state.update, result is not None)
            hypotheses = None if result is None else result.hypotheses
            with saving(self.folder, state.update, self._saved), self._average.in_place(self.state):
                save_commit(self.folder, commit, saved, self.task.description(), hypotheses)
                prove(self.folder, commit)
                finish_commit(self.folder, state, training.keep_last_params, self.schedule.goes_back)

        self.communicator.on_rank_zero(write)
        self.step.make_whole()
        self._saved = state.update

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """Returns the optimizer's tensors as saved; ranks' copies must be taken while the mean is swapped in."""
        with self._average.in_place(self.state):
            return self._ranks.optimizer_tensors(self.parameters)

    def _report_plan(self, progress: Progress) -> None:
        for note in self.budget.notes:
            progress.note(note)
        self.budget.notes.clear()

    def _save_and_stop(self, interrupts: Interrupts) -> None:
        """Saves between two checkpoints and stops."""
        state = self.state
        self._flush()
        self._tick()
        if state.update > self._saved:
            self._save(self._optimizer_tensors(), None)
        self._release_graphs()
        progress = f"saved at update {state.update}" if state.update else "no update was done yet"
        raise Interrupted(
            f"{interrupts.name}: {progress} in {self.folder.path}; run the same command to resume",
            interrupts.exit_code,
        )

    def _snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the random states and the states carried between steps."""
        states, dropout, carried = random_states(), self.step.random_state(), self.step.carried()

        def restore() -> None:
            restore_random_states(states)
            self.step.set_random_state(dropout)
            self.step.set_carried(carried)

        return restore

    @contextmanager
    def _streams_preserved(self) -> Iterator[None]:
        """Restores the random states and the states carried between steps after the context."""
        restore = self._snapshot()
        try:
            yield
        finally:
            restore()

    def _figures(self, update: int) -> Figures:
        training, state, meter = self.recipe.training, self.state, self.state.since_log
        epochs = update * training.update_interval / self.batches.batches_per_epoch
        share = share_done(training, state, epochs)
        return Figures(
            update=update,
            epoch=self.batches.epoch,
            loss=meter.loss / meter.tokens,
            learning_rate=self.schedule.learning_rate(update),
            gradient_norm=state.gradient_norm,
            tokens_per_second=meter.tokens / max(meter.seconds, 1e-9),
            memory=peak_memory(self.device),
            left=seconds_left(training, state, epochs, self._pace.seconds_per_update(state.seconds, update)),
            updates=round(update / share) if share else None,
            device=self.device.type,
            outside=outside_meter(self.device).read().total if self.device.type == "cuda" else 0,
            loss_scale=self._scaling.last,
            skipped=state.skipped,
        )

    def _last_good(self) -> str:
        saved = self._saved
        return f"the last good checkpoint is update {saved}" if saved else "there is no checkpoint yet"

    def _out_of_memory(self, batch: AnyBatch) -> str:
        return out_of_memory(batch, self.device, self._last_good(), planned=self.budget.plan is not None)
