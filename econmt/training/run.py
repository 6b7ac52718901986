"""A recipe from beginning to end: find where it stands, prepare its text, train, leave results."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from econmt.checkpoint.checkpoints import load_state
from econmt.checkpoint.folder import Commit, ModelFolder
from econmt.checkpoint.resume import Start, find_start
from econmt.checkpoint.state import TrainingState, random_states, restore_random_states, seed_everything
from econmt.checkpoint.tensor_files import write_text
from econmt.config.conditions import keys_without_effect
from econmt.config.recipe import Recipe, parse_recipe, recipe_text
from econmt.config.yaml_reader import leaves
from econmt.data.batching.store import PreparedData, prepare, reopen
from econmt.data.files import whole_file
from econmt.data.text.filters import left_out
from econmt.data.text.subwords import fingerprint
from econmt.engine.communicator import Communicator, jsonable
from econmt.engine.devices import reproducible, resolve_device
from econmt.engine.precision import Precision, precision_of_run
from econmt.engine.threads import Threads, crowded, missing_library, threads_for
from econmt.errors import EconmtError, InputError, TrainingError
from econmt.evaluation.metrics import recipe_tokenizer
from econmt.memory.plan.planner import plan_table
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.registry import make_task
from econmt.training.budget import first_plan
from econmt.training.choice import as_saved, expected_updates, refuse_missing, saved_choice, settle
from econmt.training.end_of_run import end_reason
from econmt.training.environment import differences, environment_of
from econmt.training.initialization import initialize, parameters_to_start_from
from econmt.training.interrupts import Interrupted, Interrupts
from econmt.training.pipelines import check_ranks, make_step
from econmt.training.progress import Progress, Silence
from econmt.training.ranks import check_shared
from econmt.training.results import RunResults, are_complete, make_results
from econmt.training.trainer import Trainer, TrainingResult
from econmt.training.validation import check_lengths
from econmt_ops.dispatch.rule import rules_only


class Outcome(NamedTuple):
    """Outcome of a training command. ``results`` is None if the run was complete before."""

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
) -> Outcome:
    """Trains a recipe in its model folder, from the beginning or from where it stands.

    Of several ranks the first one alone prepares, writes and speaks, and the others wait where it does.

    Args:
        recipe: the run.
        search: folders in which its text is looked for.
        console: where a person reads how it goes.
        overwrite_output: start anew, whatever is in the folder.
        resume_with_changes: go on although the recipe differs from the one the run began with.
        verify: see :func:`econmt.data.batching.store.prepare`.
        world: the processes that train together; None: this one alone.

    Raises:
        InputError: if something that the user gave cannot be used.
        TrainingError: if training had to stop.
        Interrupted: after SIGTERM or Ctrl-C, with everything saved.
    """
    communicator = Communicator() if communicator is None else communicator
    check_ranks(recipe, communicator.size)
    device = resolve_device(recipe.training.device)
    resolve_device(recipe.training.decode_and_evaluate_device or "cpu")  # one that is not there is told now
    folder = ModelFolder(recipe.output)
    if communicator.is_rank_zero:
        folder.check(overwrite=overwrite_output, last=recipe.training.max_updates)
        folder.create()
    check_shared(folder, communicator)
    with folder.locked() if communicator.is_rank_zero else contextlib.nullcontext():
        start = Start()
        if not overwrite_output:
            start = _start(recipe, folder, resume_with_changes, communicator)
        if start.commit is not None:
            state = load_state(folder, start.commit)
            reason = end_reason(recipe.training, state, state.data["epoch"])
            ended = reason is not None and state.last_checkpoint == state.update
            update = state.update
            if ended and communicator.on_rank_zero(lambda: are_complete(folder, recipe, update)):
                assert reason is not None
                result = TrainingResult(reason, state.update, state.best_update, state.metrics, False)
                return Outcome(result, None)
        if start.commit is None:
            # Preparing text may take long: what cannot be used is told before.
            parameters_to_start_from(recipe)
        threads = _threads(recipe, folder, start, device, communicator)
        with reproducible(device, threads.number):
            store = Path(recipe.data.prepared) if recipe.data.prepared else folder.prepared
            if communicator.is_rank_zero:
                prepared = prepare(recipe, store, search, show_progress=console.is_terminal, verify=verify)
            communicator.barrier()
            if not communicator.is_rank_zero:
                prepared = reopen(recipe, store)
            precision = _precision(recipe, folder, start, device, communicator)
            if overwrite_output:  # only now: text or a budget that cannot be used must not cost the old run
                first_plan(recipe, prepared, device, precision.dtype, communicator)
                if communicator.is_rank_zero:
                    folder.clear()
                    folder.create()
            try:
                result = train(
                    recipe,
                    folder,
                    prepared,
                    start=start,
                    console=console,
                    threads=threads,
                    communicator=communicator,
                )
            except Interrupted:
                communicator.destroy()
                raise
            communicator.destroy()
            if not communicator.is_rank_zero:
                return Outcome(result, None)
            return Outcome(
                result, make_results(recipe, folder, prepared, device, precision, communicator.size)
            )


def _start(
    recipe: Recipe, folder: ModelFolder, resume_with_changes: bool, communicator: Communicator
) -> Start:
    """Finds where the run starts, on rank 0 for all."""
    commit, changes, with_changes, notes = communicator.on_rank_zero(
        lambda: jsonable(find_start(recipe, folder, resume_with_changes=resume_with_changes))
    )
    return Start(None if commit is None else Commit(*commit), tuple(changes), with_changes, tuple(notes))


def train(
    recipe: Recipe,
    folder: ModelFolder,
    prepared: PreparedData,
    *,
    start: Start,
    console: Console,
    threads: Threads | None = None,
    communicator: Communicator | None = None,
) -> TrainingResult:
    """Trains prepared text until a limit; the folder must be this process's alone.

    Args:
        recipe: the run.
        folder: its model folder, in order (see :func:`~econmt.checkpoint.resume.find_start`).
        prepared: its text as ids.
        start: from where.
        console: where a person reads how it goes.
        threads: that compute, of which a person is told.
        world: the processes that train together; None: this one alone.

    Raises:
        TrainingError: if the loss is not finite, or memory or the disk are full.
        Interrupted: after SIGTERM or Ctrl-C, with everything saved.
    """
    communicator = Communicator() if communicator is None else communicator
    if recipe.training.memory_budget is not None and communicator.is_rank_zero:
        # It takes some seconds.
        console.print(f"planning for a memory budget of {recipe.training.memory_budget}", markup=False)
    trainer, notes = make_trainer(recipe, folder, prepared, start, communicator)
    if threads is not None:
        notes.append(f"threads: {threads.number} ({threads.why})")
        warnings = crowded(threads.number), missing_library()
        notes += [f"warning: {line}" for line in warnings if line is not None]
    try:
        if communicator.is_rank_zero:
            _write_recipe(folder.recipe, recipe)
        interrupts = Interrupts()
        kind = Progress if communicator.is_rank_zero else Silence
        progress = kind(folder.log, folder.tensorboard, console, trainer.state.update)
        with interrupts, progress, rules_only():
            for note in notes:
                progress.note(note)
            if trainer.budget.plan is not None:
                progress.show(plan_table(trainer.budget.plan, communicator.size))
            try:
                result = trainer.run(progress, interrupts)
            except EconmtError as error:
                with contextlib.suppress(OSError):  # the disk may be what is full
                    progress.record(f"training stopped: {error}")
                raise
            progress.note(f"training ended: {result.reason}; best checkpoint {result.best_update}")
            return result
    except OSError as error:
        place = error.filename or folder.path
        raise TrainingError(
            f"{place}: cannot be written ({error.strerror or error}); the last checkpoint is whole: look to the disk "
            "and the permissions, and run the same command again to go on"
        ) from error


def make_trainer(
    recipe: Recipe,
    folder: ModelFolder,
    prepared: PreparedData,
    start: Start,
    communicator: Communicator | None = None,
) -> tuple[Trainer, list[str]]:
    """A trainer at its start, and what a person should know about it, one line each."""
    communicator = Communicator() if communicator is None else communicator
    device = resolve_device(recipe.training.device)
    precision = _precision(recipe, folder, start, device, communicator)
    seed_everything(recipe.training.seed)
    task = make_task(recipe, prepared)
    model = task.build_model()
    for path in prepared.vocabulary_files if communicator.is_rank_zero else ():
        _copy(path, folder.path / path.name, start)
    communicator.barrier()
    state = TrainingState(
        vocabulary=fingerprint(folder.path),
        text=text_fingerprint(prepared),
        environment=environment_of(device),
    )
    beginnings: list[str] = []
    if start.commit is None:
        given = parameters_to_start_from(recipe)
        beginnings = initialize(model, recipe, given, prepared.vocabularies, state.vocabulary)
    begun = {} if start.commit is None else load_state(folder, start.commit).pipeline
    step, pipeline, divisions = make_step(
        task, model.to(device), task.batches(prepared), precision, communicator, begun
    )
    trainer = Trainer(step, folder, prepared, state)
    count = sum(parameter.numel() for parameter in model.parameters())
    notes = [
        f"{recipe.name}: {count:,} parameters, {len(prepared.train):,} {'pairs' if task.translates else 'lines'}, "
        f"{trainer.batches.batches_per_epoch:,} batches an epoch, {device}, folder {folder.path}",
        *filter(None, [left_out(recipe, prepared.statistics)]),
        f"precision: {precision.name} ({precision.why})",
        *beginnings,
        *filter(None, [_of_ranks(communicator, recipe)]),
        *divisions,
    ]
    if start.commit is not None:
        notes += [*start.notes, *trainer.load(start.commit)]
        notes += [f"going on with a changed recipe: {change}" for change in start.changes]
        notes += differences(trainer.state.environment, state.environment)
        trainer.state.environment = state.environment
        if trainer.state.text not in (state.text, _older_text_fingerprint(prepared)):
            if not start.with_changes:
                raise InputError(
                    f"{folder.path}: the run began with other text (a training or validation file has changed); put it "
                    "back, go on all the same with --resume-with-changes, or start anew with --overwrite-output"
                )
            notes.append("going on with changed text")
        trainer.state.text = state.text
        notes.append(f"going on from update {trainer.state.update}")
    if task.translates:
        tokenizer = recipe_tokenizer(recipe, trainer.state.signature)
        notes += [tokenizer.note] if tokenizer.note else []
    notes += check_lengths(prepared, recipe)
    trainer.state.precision, trainer.state.pipeline = precision.name, pipeline
    trainer.make_plan()
    if trainer.budget.plan is None:
        notes.append(_choose(trainer, communicator))
    if communicator.size > 1:  # rank 0 may have drawn while it measured
        restore_random_states(communicator.on_rank_zero(random_states))
    return trainer, notes


def _of_ranks(communicator: Communicator, recipe: Recipe) -> str:
    """Describes how several ranks share the run; for a single rank, the keys of the recipe that need several."""
    if communicator.size == 1:
        idle = keys_without_effect(recipe, processes=1) - keys_without_effect(recipe)
        keys = [key for key, _ in leaves(recipe, changed_only=True) if key in idle]
        return f"note: without effect in one process: {', '.join(keys)}" if keys else ""
    parts = [f"gradients in {recipe.parallel.reduction}"]
    parts += [f"in pipelines of {communicator.stages}"] if communicator.stages > 1 else []
    parts += ["the optimizer's state in shares"] if recipe.parallel.shard_optimizer else []
    return f"ranks: {communicator.size}, {communicator.local_size} on this host, {', '.join(parts)}"


def _precision(
    recipe: Recipe, folder: ModelFolder, start: Start, device: torch.device, communicator: Communicator
) -> Precision:
    """Returns the run's precision: the one it began with, or the faster one on rank 0 for a new run."""
    found: list[Precision] = []

    def own() -> str:
        saved = "" if start.commit is None else load_state(folder, start.commit).precision
        found.append(precision_of_run(recipe, device, saved))
        return found[0].name

    name = communicator.on_rank_zero(own)
    return found[0] if found else precision_of_run(recipe, device, name)


def _threads(
    recipe: Recipe, folder: ModelFolder, start: Start, device: torch.device, communicator: Communicator
) -> Threads:
    """Returns the number of threads: the recipe's, the one the run began with, or the fastest for a new run."""

    def own() -> list[Any]:
        saved = (
            "" if start.commit is None else load_state(folder, start.commit).environment.get("threads", "")
        )
        began = int(saved) if saved.isdecimal() else 0
        return [
            *threads_for(recipe.training.threads, device, recipe.model.widest, began, communicator.local_size)
        ]

    return Threads(*communicator.on_rank_zero(own))


def _choose(trainer: Trainer, communicator: Communicator) -> str:
    """:func:`_chosen` of rank 0 for all of them."""
    found: list[str] = []

    def own() -> list[str]:
        found.append(_chosen(trainer))
        return list(trainer.step.implementations)

    chosen = Implementations(*communicator.on_rank_zero(own))
    trainer.step.implementations = chosen
    trainer.state.choices = as_saved(chosen, trainer.device)
    return "".join(found)


def _chosen(trainer: Trainer) -> str:
    """Fixes what the recipe leaves at auto, as it was when the run began or by measuring; says which and why."""
    recipe, model, state = trainer.recipe, trainer.model, trainer.state
    given = Implementations.of(recipe.ops)
    refuse_missing(given, trainer.device.type)
    chosen, why = saved_choice(recipe, state.choices, trainer.device), "as the run began"
    if chosen is None:
        frequent = max(trainer.batches.shapes(), key=lambda shape: shape.batches * shape.rows)
        shape = Shape(frequent.rows, frequent.source, frequent.target)
        tokens = int(trainer.prepared.train.target_lengths.sum()) + len(trainer.prepared.train)
        updates = expected_updates(recipe.training, trainer.batches.batches_per_epoch, tokens)
        carried = trainer.step.carried()
        chosen, why = settle(
            trainer.task, lambda: model, shape, trainer.device, trainer.step.precision, updates
        )
        trainer.step.set_carried(carried)
    trainer.step.implementations = chosen
    state.choices = as_saved(chosen, trainer.device)
    parts = ", ".join(f"{field} {name}" for field, name in chosen._asdict().items())
    return f"ops: {parts} ({why})"


def text_fingerprint(prepared: PreparedData) -> str:
    """Tells prepared texts apart by all that training and validation read: ids, lengths, and raw validation lines."""
    read = (
        "train.tokens",
        "train.index",
        "valid.tokens",
        "valid.index",
        "valid.source.txt",
        "valid.target.txt",
    )
    return hashlib.sha256("".join(prepared.checksums[name] for name in read).encode()).hexdigest()


def _older_text_fingerprint(prepared: PreparedData) -> str:
    """Returns the fingerprint of states from before stores had checksums: counts and reference lines."""
    counts = {key: value for key, value in prepared.statistics.items() if key not in ("seconds", "test")}
    digest = hashlib.sha256(json.dumps(counts, sort_keys=True).encode())
    for line in (*prepared.valid_source, *prepared.valid_target):
        digest.update(line.encode("utf-8") + b"\n")
    return digest.hexdigest()


def _write_recipe(path: Path, recipe: Recipe) -> None:
    """Writes the resolved recipe, unless what is there says the same: someone may have put comments in."""
    if not (path.exists() and parse_recipe(path.read_text(encoding="utf-8"), str(path)) == recipe):
        write_text(path, recipe_text(recipe))


def _copy(source: Path, destination: Path, start: Start) -> None:
    """Puts a vocabulary file into the model folder; a run that goes on must find the one it began with."""
    content = source.read_bytes()
    if destination.exists() and destination.read_bytes() == content:
        return
    if start.commit is not None:
        raise InputError(
            f"{destination}: the run began with another vocabulary than the prepared text has ({source}); put back the "
            "text it began with, or start anew with --overwrite-output"
        )
    with whole_file(destination) as file:
        file.write(content)
