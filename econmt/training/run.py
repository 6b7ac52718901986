"""Runs a recipe from beginning to end: find the starting point, prepare the text, train, write results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from econmt.budget.planner import plan_table
from econmt.budget.run_budget import first_plan
from econmt.checkpoint.checkpoints import load_state
from econmt.checkpoint.folder import Commit, ModelFolder
from econmt.checkpoint.recovery import Start, find_start
from econmt.checkpoint.state import TrainingState, random_states, restore_random_states
from econmt.checkpoint.tensor_files import write_text
from econmt.config.conditions import keys_without_effect
from econmt.config.recipe import Recipe, parse_recipe, recipe_text
from econmt.config.yaml_reader import leaves
from econmt.data.batching.store import PreparedData, open_prepared, prepare
from econmt.data.progress_bars import Heartbeat, status_line
from econmt.data.text.filters import left_out
from econmt.data.text.subwords import fingerprint
from econmt.engine.communicator import Communicator, jsonable
from econmt.engine.devices import reproducible, resolve_device, unused_kernels
from econmt.engine.outside_memory import limit_workspaces, outside_meter
from econmt.engine.parameters import prepare_parameters
from econmt.engine.step import check_settings
from econmt.engine.threads import crowded, missing_library
from econmt.errors import EconmtError, InputError, TrainingError
from econmt.evaluation.metrics import recipe_tokenizer
from econmt.tasks.registry import make_task
from econmt.training.choice import choose
from econmt.training.context import (
    RunContext,
    compare,
    copy_vocabulary,
    environment_of,
    make_context,
    text_fingerprint,
)
from econmt.training.decisions import end_reason
from econmt.training.hooks import Hook
from econmt.training.initialization import initialize, parameters_to_start_from
from econmt.training.interrupts import Interrupted, Interrupts
from econmt.training.pipelines import check_ranks, make_step
from econmt.training.progress import Progress
from econmt.training.ranks import check_shared
from econmt.training.results import RunResults, are_complete, make_results
from econmt.training.trainer import Trainer, TrainingResult
from econmt.training.validation import check_lengths
from econmt_ops.dispatch.rule import rules_only

HEARTBEAT = 30.0
"""Seconds without a line after which a run that is not on a terminal says what it is doing."""


class Outcome(NamedTuple):
    """Outcome of a command; ``results`` is None if the run was complete before."""

    training: TrainingResult
    results: RunResults | None


def run_recipe(
    recipe: Recipe,
    search: Sequence[Path],
    *,
    console: Console,
    overwrite_output: bool = False,
    resume_with_changes: bool = False,
    verify: bool = False,
    communicator: Communicator | None = None,
    hook: Hook | None = None,
) -> Outcome:
    """Trains a recipe in its model folder, from the beginning or from the last saved state.

    With several ranks, only rank 0 prepares, writes and prints; the others wait for it.

    Args:
        search: Folders to search for its text.
        overwrite_output: True to start anew and delete an earlier run in the folder.
        resume_with_changes: True to resume although the recipe differs from the one that the run began with.
        verify: See :func:`econmt.data.batching.store.prepare`.
        communicator: Communicator of the processes that train together; None: a single process.
        hook: Judges the translations of every checkpoint; see :mod:`econmt.training.hooks`.

    Raises:
        InputError: Recipe, text or folder cannot be used.
        TrainingError: Training had to stop.
        Interrupted: SIGTERM or Ctrl-C was received; everything is saved.
    """
    began = time.monotonic()
    communicator = Communicator() if communicator is None else communicator
    check_run(recipe, communicator.size, hook)
    device = resolve_device(recipe.training.device)
    if device.type == "cuda":
        limit_workspaces(recipe.training.precision)
        outside_meter(device)  # begins before anything else uses the GPU
    folder = ModelFolder(recipe.output)
    if communicator.is_rank_zero:
        folder.check(overwrite=overwrite_output, last=recipe.training.max_updates)
        folder.create()
    check_shared(folder, communicator)
    with (
        folder.locked() if communicator.is_rank_zero else contextlib.nullcontext(),
        _heartbeat(console, communicator) as heartbeat,
    ):
        start = Start()
        if not overwrite_output:
            start = _find_start(recipe, folder, resume_with_changes, communicator)
        saved = None if start.commit is None else load_state(folder, start.commit)
        if saved is None:
            # Preparing text may take long; unusable parameters are reported before.
            parameters_to_start_from(recipe)
        elif result := _finished(recipe, folder, saved, communicator):
            return Outcome(result, None)
        heartbeat.say("preparing the text")
        prepared = _prepare(recipe, folder, search, console, verify, communicator)
        heartbeat.say("measuring what is fastest here")
        context = make_context(recipe, folder, prepared, start, saved, device, communicator)
        context = replace(context, began=began, heartbeat=heartbeat, hook=hook)
        with reproducible(device, context.threads.number):
            if (
                overwrite_output
            ):  # only now, since unusable text, settings or budget must not cost the old run
                check_settings(recipe, context.precision, communicator.size)
                first_plan(recipe, prepared, device, context.precision, communicator)
                if communicator.is_rank_zero:
                    folder.clear()
                    folder.create()
            try:
                result = train(context, console)
            except Interrupted:
                communicator.destroy()
                raise
            communicator.destroy()
            if not communicator.is_rank_zero:
                return Outcome(result, None)
            shown = status_line() if console.is_terminal else contextlib.nullcontext(heartbeat.say)
            with shown as say:
                return Outcome(result, make_results(context, say))


def check_run(recipe: Recipe, processes: int = 1, hook: Hook | None = None) -> None:
    """Checks what needs no text: processes, validation hook and device.

    Raises:
        InputError: The recipe cannot be trained with them.
    """
    check_ranks(recipe, processes)
    _check_hook(recipe, hook)
    resolve_device(recipe.training.device)


def _check_hook(recipe: Recipe, hook: Hook | None) -> None:
    """Raises InputError if a hook is missing, or would get no translations."""
    training = recipe.training
    if hook is None and training.early_stopping.metric == "hook":
        raise InputError(
            "training.early_stopping.metric hook needs a validation hook; give econmt train --validation-hook PROGRAM"
        )
    if hook is not None and (recipe.task != "translation" or training.decode_and_evaluate == 0):
        raise InputError(
            "a validation hook judges translations, and this recipe makes none at checkpoints; leave it out"
        )


@contextlib.contextmanager
def _heartbeat(console: Console, communicator: Communicator) -> Iterator[Heartbeat]:
    """Yields the heartbeat of a run; it beats on rank 0 unless the console is quiet or a terminal."""
    heartbeat = Heartbeat(HEARTBEAT)
    beats = communicator.is_rank_zero and not (console.quiet or console.is_terminal)
    with heartbeat if beats else contextlib.nullcontext():
        yield heartbeat


def _find_start(
    recipe: Recipe, folder: ModelFolder, resume_with_changes: bool, communicator: Communicator
) -> Start:
    """Returns the start of the run that rank 0 finds."""
    commit, changes, with_changes, notes = communicator.on_rank_zero(
        lambda: jsonable(find_start(recipe, folder, resume_with_changes=resume_with_changes))
    )
    return Start(None if commit is None else Commit(*commit), tuple(changes), with_changes, tuple(notes))


def _finished(
    recipe: Recipe, folder: ModelFolder, saved: TrainingState, communicator: Communicator
) -> TrainingResult | None:
    """Returns the result of a run that has ended and has complete results; None if there is something to do."""
    reason = end_reason(recipe.training, saved, saved.data["epoch"])
    if reason is None or saved.last_checkpoint != saved.update:
        return None
    if not communicator.on_rank_zero(lambda: are_complete(folder, recipe, saved.update)):
        return None
    return TrainingResult(reason, saved.update, saved.best_update, saved.metrics)


def _prepare(
    recipe: Recipe,
    folder: ModelFolder,
    search: Sequence[Path],
    console: Console,
    verify: bool,
    communicator: Communicator,
) -> PreparedData:
    """Prepares the text on rank 0; the other ranks open the result."""
    store = Path(recipe.data.prepared) if recipe.data.prepared else folder.prepared
    if communicator.is_rank_zero:
        prepared = prepare(recipe, store, search, show_progress=console.is_terminal, verify=verify)
    communicator.barrier()
    return prepared if communicator.is_rank_zero else open_prepared(store)


def train(context: RunContext, console: Console) -> TrainingResult:
    """Trains on prepared text until a limit is reached; no other process may use the folder.

    Raises:
        TrainingError: The loss is not finite, or memory or disk are full.
        Interrupted: SIGTERM or Ctrl-C was received; everything is saved.
    """
    recipe, folder, communicator = context.recipe, context.folder, context.communicator
    if recipe.training.memory_budget is not None and communicator.is_rank_zero:
        # Planning takes some seconds.
        console.print(f"planning for a memory budget of {recipe.training.memory_budget}", markup=False)
    trainer, notes = make_trainer(context)
    try:
        progress = Progress(folder.log, folder.tensorboard, console, trainer.state.update, context.heartbeat)
        if communicator.is_rank_zero:
            path = folder.recipe  # an equal one stays, which may contain a user's comments
            if not (path.exists() and parse_recipe(path.read_text(encoding="utf-8"), str(path)) == recipe):
                write_text(path, recipe_text(recipe))
        else:
            progress = Progress.silent()
        interrupts = Interrupts()
        with interrupts, progress, rules_only():
            for note in notes:
                progress.note(note)
            if trainer.budget.plan is not None:
                progress.show(plan_table(trainer.budget.plan, communicator.size))
            try:
                result = trainer.run(progress, interrupts)
            except EconmtError as error:
                with contextlib.suppress(OSError):  # the disk may be full
                    progress.record(f"training stopped: {error}")
                raise
            progress.note(f"training ended: {result.reason}; best checkpoint {result.best_update}")
            return result
    except OSError as error:
        location = error.filename or folder.path
        raise TrainingError(
            f"{location}: cannot be written ({error.strerror or error}); the last checkpoint is intact; check the disk "
            "and the permissions, and run the same command to resume"
        ) from error


def make_trainer(context: RunContext) -> tuple[Trainer, list[str]]:
    """Creates a trainer at its starting point; returns it with messages for the user, one line each."""
    recipe, folder, prepared, start = context.recipe, context.folder, context.prepared, context.start
    device, precision, communicator = context.device, context.precision, context.communicator
    torch.manual_seed(recipe.training.seed)
    task = make_task(recipe, prepared)
    model = task.build_model()
    if communicator.is_rank_zero:
        copy_vocabulary(context)
    communicator.barrier()
    vocabulary, text = fingerprint(folder.path), text_fingerprint(prepared)
    state = TrainingState(vocabulary=vocabulary, text=text, environment=environment_of(device))
    initial_notes: list[str] = []
    if start.commit is None:
        initial_file = parameters_to_start_from(recipe)
        initial_notes = initialize(model, recipe, initial_file, prepared.vocabularies, vocabulary)
    # Before they are copied, since parameters that shrink on a GPU leave gaps that other streams cannot use.
    prepare_parameters(model, recipe.training)
    step, pipeline, divisions = make_step(task, model.to(device), context)
    trainer = Trainer(step, folder, prepared, state, context.began, context.hook)
    notes = [
        f"{recipe.name}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, "
        f"{len(prepared.train):,} {'pairs' if task.translates else 'lines'}, "
        f"{trainer.batches.batches_per_epoch:,} batches per epoch, device {device}, folder {folder.path}",
        left_out(recipe, prepared.statistics),
        f"precision: {precision.name} ({precision.why})",
        *initial_notes,
        _describe_ranks(communicator, recipe),
        *divisions,
    ]
    if start.commit is not None:
        notes += [*start.notes, *trainer.load(start.commit)]
        notes += [f"resuming with a changed recipe: {change}" for change in start.changes]
        notes += compare(context, trainer.state, state)
        trainer.state.environment, trainer.state.text = state.environment, state.text
        notes.append(f"resuming from update {trainer.state.update}")
    if task.translates:
        notes.append(recipe_tokenizer(recipe, trainer.state.signature).note)
    notes += check_lengths(prepared, recipe, task.translates)
    trainer.state.precision, trainer.state.pipeline = precision.name, pipeline
    taken = sum(tensor.nbytes for tensor in step.optimizer_tensors().values())
    trainer.budget.make(trainer.state, taken)
    if trainer.budget.plan is None:
        notes.append(choose(step, trainer.batches, trainer.state))
    if communicator.size > 1:  # measuring may have drawn random numbers on rank 0
        restore_random_states(communicator.on_rank_zero(random_states))
    notes.append(f"threads: {context.threads.number} ({context.threads.why})")
    warnings = crowded(context.threads.number), missing_library(), unused_kernels(context.device)
    notes += [f"warning: {line}" for line in warnings if line is not None]
    return trainer, [note for note in notes if note]


def _describe_ranks(communicator: Communicator, recipe: Recipe) -> str:
    """Describes how ranks share the run; for a single process, names recipe keys that have no effect."""
    if communicator.size == 1:
        idle = keys_without_effect(recipe, processes=1) - keys_without_effect(recipe)
        keys = [key for key, _ in leaves(recipe, changed_only=True) if key in idle]
        return f"note: no effect in a single process: {', '.join(keys)}" if keys else ""
    parts = [f"gradients summed in {recipe.parallel.reduction}"]
    parts += [f"pipelines of {communicator.stages} stages"] if communicator.stages > 1 else []
    parts += ["optimizer state sharded"] if recipe.parallel.shard_optimizer else []
    return f"ranks: {communicator.size}, {communicator.local_size} on this host, {', '.join(parts)}"
