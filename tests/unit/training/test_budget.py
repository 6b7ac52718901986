"""A byte budget changes how batches are computed and never what is learnt."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from econmt.budget import run_budget
from econmt.budget.planner import BatchBudget, MemoryPlan, Planner
from econmt.budget.run_budget import Budget, divide, first_plan
from econmt.checkpoint.state import TrainingState
from econmt.config.recipe import load_recipe
from econmt.config.training import ParallelSection
from econmt.data.batching.batches import Batch
from econmt.decoding.search.beam import MAX_OUTPUT_EXTRA
from econmt.decoding.translator import Translator
from econmt.engine.communicator import Communicator
from econmt.engine.devices import is_out_of_memory
from econmt.engine.precision import NAMED
from econmt.errors import InputError, TrainingError
from econmt.estimate.byte_budget import AUTO_SHARE
from econmt.model import Implementations, layers
from econmt.parallel.simulated_rank import Rank, SimulatedRank
from econmt.tasks.translation import TranslationTask
from econmt.training.trainer import Trainer
from econmt.training.validation import validate
from econmt_memory.measure.ledger import OutsideMemory
from econmt_ops.dispatch.device_limits import H200
from tests.unit.training.conftest import LEAN, UseRows
from tests.unit.training.test_trainer import batch_of, gradients
from tests.unit.training.tiny import MakeRun, Run, snapshot, watch_losses

BUDGET = "training.memory_budget=1GiB"
EXACT = ("model.dropout=0.0", "training.gradient_clipping.type=none")
# Plans from the real estimator: the same model in all tests, so that what one has estimated another knows.
REAL = ("training.batch.size=16", "model.dropout=0.0")
CPU = torch.device("cpu")
FULL = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:123] DefaultCPUAllocator: can't allocate memory: error 12"),
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]


def fill_memory(monkeypatch: pytest.MonkeyPatch, rows: int, error: BaseException = FULL[0]) -> list[int]:
    """Lets training fail on more than so many rows, the gradient half computed; returns the rows of each attempt."""
    attempts = []

    real = TranslationTask.loss

    def limited(
        task: TranslationTask, model: Any, batch: Batch, how: Implementations, *smoothing: float
    ) -> torch.Tensor:
        loss = real(task, model, batch, how, *smoothing)
        if not loss.requires_grad:  # validation
            return loss
        attempts.append(len(batch.indices))
        if len(batch.indices) > rows:
            torch.autograd.backward(loss)
            raise error
        return loss

    monkeypatch.setattr(TranslationTask, "loss", limited)
    return attempts


Planned = Callable[..., Run]


@pytest.fixture
def planned(make_run: MakeRun, use_rows: UseRows) -> Planned:
    """Makes runs with a byte budget whose plans have so many rows a micro-batch."""

    def make(rows: int, *overrides: str, name: str = "run", **settings: int) -> Run:
        use_rows(rows, **settings)
        return make_run(BUDGET, *overrides, name=name)

    return make


def test_a_batch_of_all_ranks_is_divided_into_the_micro_batches_of_each(make_run: MakeRun) -> None:
    trainer = make_run().trainer()
    batch = batch_of(trainer, range(8))
    plan = MemoryPlan(1, [BatchBudget(*batch.positions, 4, 1, 2, 1, LEAN)], 1)
    for ranks, rows in ((1, [2, 2, 2, 2]), (2, [4, 4]), (4, [8])):
        parts = divide(batch, plan, Implementations(), ranks)
        assert [len(part.indices) for part, _ in parts] == rows
        assert {how for _, how in parts} == {LEAN}
    assert divide(batch, None, Implementations()) == [(batch, Implementations())]


def test_without_a_budget_there_is_no_plan(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Planner, "allot")
    run = make_run("training.max_updates=2", "ops.encoder=recompute").trained()
    assert "plan" not in run.said()
    trainer = run.trainer()
    assert trainer.budget.plan is None
    assert trainer.state.plan == {}
    assert trainer.step.implementations == Implementations.everywhere("recompute")


def test_the_plan_is_shown_and_logged(planned: Planned) -> None:
    run = planned(3, "training.max_updates=2").trained()
    log = run.folder.log.read_text()
    for text in (run.said(), log):
        assert "plan for a memory budget of 1 GiB" in text
        for words in ("2 of 3", "recompute encoder,", "outputs", "predicted"):
            assert words in text
    assert all(line[:2] == "20" for line in log.splitlines())


def test_a_saved_plan_is_taken_over(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(2, "training.max_updates=2").train()
    run = planned(2, "training.max_updates=4")
    monkeypatch.delattr(Planner, "allot")
    run.train()
    assert "micro-batches" in run.said()
    trainer = run.trainer()
    assert {entry.rows for entry in trainer.budget.plan} == {2}
    assert {entry[:2] for entry in trainer.budget.plan} == {shape[:2] for shape in trainer.batches.shapes()}


def test_another_budget_makes_another_plan_and_asks_for_no_leave(make_run: MakeRun, planned: Planned) -> None:
    make_run("training.max_updates=2").train()
    planned(2, "training.max_updates=4").train()
    planned(1, "training.memory_budget=2GiB", "training.max_updates=6").train()
    assert {entry.rows for entry in make_run("training.memory_budget=2GiB").trainer().budget.plan} == {1}
    last = make_run("ops.output=recompute", "training.max_updates=8").trained()
    assert last.trainer().state.plan == {}


@pytest.mark.parametrize("few", [0, 10**9], ids=["sparse", "dense"])
@pytest.mark.parametrize("error", FULL, ids=["cpu", "cuda", "cublas", "python"])
def test_full_memory_halves_the_micro_batch_and_repeats_the_step(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, error: BaseException, few: int
) -> None:
    monkeypatch.setattr(layers, "_FEW", few)  # the gradients of embeddings are rows
    trainer = planned(8, *EXACT, "training.batch.size=8").trainer()
    batches = [batch_of(trainer, range(3)), batch_of(trainer, range(8))]
    whole = gradients(trainer, batches)
    attempts = fill_memory(monkeypatch, 4, error)
    halved = gradients(trainer, batches)
    assert attempts == [3, 8, 3, 4, 4]
    for name, value in whole.items():
        torch.testing.assert_close(halved[name], value, rtol=1e-4, atol=1e-7)
    gradients(trainer, batches)
    assert attempts[5:] == [3, 4, 4]
    (note,) = trainer.budget.notes
    shape = f"{batches[1].source.shape[1]} x {batches[1].target_output.shape[1]}"
    assert note == f"out of memory on cpu for 8 pairs of {shape}; micro-batches have at most 4 from now on"


def test_a_run_whose_memory_was_full_is_that_of_the_smaller_plan(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = planned(2, name="small").trained()
    fill_memory(monkeypatch, 2)
    for updates in (4, 8):
        full = planned(4, f"training.max_updates={updates}", name="full").trained()
    # Masks of dropout are drawn for each micro-batch, and attempts that failed have drawn none.
    found, expected = (
        {name: content for name, content in snapshot(run.folder).items() if name.endswith("safetensors")}
        for run in (full, small)
    )
    assert found == expected
    assert len(found) > 2
    assert {entry.rows for entry in full.trainer().budget.plan} == {2}
    assert "micro-batches have at most 2 from now on" in full.folder.log.read_text()


def test_one_sentence_that_does_not_fit_ends_the_run(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = fill_memory(monkeypatch, 0)
    message = r"^out of memory on cpu for a batch of 1 pairs, .*: lower data\.max_length or"
    with pytest.raises(TrainingError, match=message):
        planned(4).train()
    assert attempts == [4, 2, 1]


def test_other_errors_are_no_lack_of_memory(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = planned(4).trainer()
    fill_memory(monkeypatch, 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        gradients(trainer, [batch_of(trainer, range(4))])
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator"))


def test_without_a_budget_full_memory_ends_the_run_and_names_the_budget(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_run().trainer()
    fill_memory(monkeypatch, 2)
    with pytest.raises(TrainingError, match=r"for a batch of 4 pairs.*set training\.memory_budget=auto"):
        gradients(trainer, [batch_of(trainer, range(4))])


def test_the_worst_micro_batch_runs_first_and_leaves_no_trace(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, shapes = planned(3).trainer(), list[tuple[int, ...]]()
    worst = trainer.budget.plan.worst

    def note(batch: Batch, _: Implementations) -> None:
        shapes.append((*batch.source.shape, batch.target_output.shape[1]))

    watch_losses(monkeypatch, note)
    state, before = torch.get_rng_state(), [p.clone() for p in trainer.parameters.values()]
    trainer.rehearse()
    assert shapes == [(worst.rows, worst.source, worst.target)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, trainer.parameters.values()))
    assert all(parameter.grad is None for parameter in trainer.parameters.values())
    assert trainer.batches.state_dict()["position"] == 0


def test_on_a_cpu_there_is_a_first_step_only_with_a_budget(
    make_run: MakeRun, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(Trainer, "rehearse", lambda trainer: calls.append(trainer.state.update))
    make_run("training.max_updates=2").train()
    assert calls == []
    planned(3, "training.max_updates=2", name="bounded").train()
    assert calls == [0]


def test_validation_obeys_the_budget(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = planned(2, "training.max_updates=8", decoding_rows=2).trained().trainer()
    rows, sizes = list[int](), list[int]()
    watch_losses(monkeypatch, lambda batch, _: rows.append(len(batch.indices)))

    class Noted(Translator):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            sizes.append(self.options.batch_size)

    monkeypatch.setattr("econmt.training.validation.Translator", Noted)
    free, bounded = (validate(trainer.step, trainer.prepared, plan) for plan in (None, trainer.budget.plan))
    assert rows == [6, 2, 2, 2]
    assert sizes == [64, 2]
    assert bounded.perplexity == pytest.approx(free.perplexity, rel=1e-6)
    assert bounded.hypotheses == free.hypotheses


def test_a_budget_below_the_parameters_is_refused_without_an_estimate(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("econmt.budget.run_budget.estimator", None)  # it would be asked before anything else
    with pytest.raises(InputError, match=r"20 KiB: the parameters and the optimizer's state alone take"):
        make_run("training.memory_budget=20KiB", *REAL).trainer()


def memory_outside(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> list[int]:
    """Sets the MiB outside of PyTorch's allocator that budgets count; returns numbers of graphs they are asked for."""
    asked: list[int] = []
    expected = OutsideMemory(*(size << 20 for size in sizes))
    meter = SimpleNamespace(
        expected=lambda graphs: asked.append(graphs) or expected, source="measured somehow"
    )
    monkeypatch.setattr("econmt.budget.run_budget.outside_meter", lambda device: meter)
    return asked


def make_on_gpu(run: Run) -> Budget:
    """Makes the plan of a run as for a GPU."""
    budget = run.trainer().budget
    budget.device = torch.device("cuda")
    budget.make(TrainingState(), 0)
    return budget


def test_a_gpus_budget_is_about_all_of_its_memory(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, run = memory_outside(monkeypatch, 300, 150, 50), planned(2)
    budget = make_on_gpu(run)
    assert asked == [len(run.trainer().batches.shapes())]
    assert budget.plan.budget == (1024 - 500) << 20
    assert budget.notes == [
        "training.memory_budget 1GiB: 500 MiB of it for memory outside of PyTorch's allocator (context 300 MiB, "
        "libraries 150 MiB, kernels and CUDA graphs 50 MiB; measured somehow)"
    ]
    message = "beside 500 MiB outside of PyTorch's allocator; use a larger budget, such as"
    with pytest.raises(InputError, match=message):
        make_on_gpu(planned(2, "training.memory_budget=400MiB", "training.cuda_graphs=off"))
    assert asked[1:] == [0]


@pytest.mark.parametrize(
    ("search", "refused"),
    [(0, "one sentence of the worst bucket"), (10 << 20, "translating one validation sentence")],
)
def test_advice_for_a_gpu_counts_what_is_outside_too(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, search: int, refused: str
) -> None:
    memory_outside(monkeypatch, 300, 150, 50)
    monkeypatch.setattr("econmt.budget.run_budget.estimate_search", lambda *_: search)

    def made(budget: str) -> Budget:
        return make_on_gpu(make_run(f"training.memory_budget={budget}", "training.cuda_graphs=off", *REAL))

    with pytest.raises(InputError, match=rf"^training\.memory_budget 50\d MiB: {refused}") as error:
        made("515000KiB" if search else "513000KiB")
    assert "beside 500 MiB outside of PyTorch's allocator; set training.memory_budget=" in str(error.value)
    advised = re.search(r"memory_budget=(\S+)", str(error.value))
    assert made(advised[1]).plan is not None


def test_auto_is_what_the_device_has(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt.estimate.byte_budget.free_memory", lambda device: 10**9)
    monkeypatch.setattr("econmt.estimate.byte_budget.group_memory", lambda: None)
    run = planned(2, "training.memory_budget=auto", "training.max_updates=2")
    trainer = run.trainer()
    weights = sum(parameter.nbytes for parameter in trainer.parameters.values())
    assert trainer.budget.plan.budget == int(AUTO_SHARE * (10**9 + weights))
    run.train()
    # A run that goes on keeps its plan, though other programs have come and gone.
    monkeypatch.setattr("econmt.estimate.byte_budget.free_memory", lambda device: 10**8)
    assert run.trainer().budget.plan.budget == trainer.budget.plan.budget
    # Unless the machine is another one.
    monkeypatch.setattr("econmt.budget.run_budget.total_memory", lambda device: 10**9)
    assert run.trainer().budget.plan.budget < trainer.budget.plan.budget


def test_a_search_that_does_not_fit_is_refused(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(2, "training.memory_budget=1MiB", decoding_rows=0)
    monkeypatch.setattr("econmt.budget.run_budget.estimate_search", lambda *_: 10**9)
    message = r"with decoding\.beam_size=2 needs .*; set training\.memory_budget=.* or a"
    with pytest.raises(InputError, match=message):
        run.trainer()


def test_budgets_know_the_state_of_the_optimizer(make_run: MakeRun) -> None:
    for optimizer, copies in (("{name: adam}", 2), ("{name: sgd}", 0), ("{name: sgd, momentum: 0.9}", 1)):
        trainer = make_run(f"training.optimizer={optimizer}").trainer()
        weights = sum(parameter.nbytes for parameter in trainer.parameters.values())
        assert budget_of(trainer, Communicator())._state == copies * weights
    trainer = make_run("training.averaging={start: non-monotone}").trainer()
    assert trainer.budget._state == 3 * weights, "the mean, too, before it begins"
    trainer = make_run("training.fixed_param_names=['(?!decoder).*']").trainer()
    learnt = [part for part in trainer.parameters.values() if part.requires_grad]
    assert 0 < len(learnt) < len(trainer.parameters)
    assert trainer.budget._state == 2 * sum(part.nbytes for part in learnt), "what is fixed has none"


@pytest.mark.parametrize(("updates", "count"), [(0, 5), (3, 2), (4, 1), (5, 0), (6, 0)])
def test_no_more_shapes_are_prepared_than_updates_follow(make_run: MakeRun, updates: int, count: int) -> None:
    trainer = make_run("training.max_updates=5", "training.bucket_width=1").trainer()
    shapes = [batch.positions for batch in trainer.budget.every_shape(updates)]
    frequent = sorted(trainer.batches.shapes(), key=lambda shape: -shape.batches)
    assert len(frequent) > 5
    assert shapes == [(shape.source, shape.target) for shape in frequent[:count]]


def test_a_plan_holds_for_the_same_text_shapes_state_precision_and_ranks_only(
    make_run: MakeRun, planned: Planned
) -> None:
    derived = "training.bucket_width=null"
    budget = planned(2, derived).trainer().budget
    before = budget._made_for("text")
    assert budget._made_for("other text") != before
    for change in (
        "data.noise.typos=0.5",
        "data.mixing.weights=[[1]]",
        "data.subwords={type: bpe, dropout: 0.1}",
        "training.fixed_param_names=[output.bias]",
        "training.batch.size=5",
        "training.max_buckets=2",
        ("precision", NAMED["bfloat16"]),
        ("device", torch.device("meta")),
        ("communicator", SimulatedRank(Rank(0, 2), ParallelSection())),
    ):
        changed = copy.copy(budget)
        if isinstance(change, str):
            changed.recipe = make_run(BUDGET, derived, change).recipe
        else:
            setattr(changed, *change)
        assert changed._made_for("text") != before, change
    assert budget._made_for("text") == before


def test_a_rank_plans_with_its_rows_and_its_share_of_the_state(make_run: MakeRun) -> None:
    run = make_run("training.memory_budget=64MiB", *REAL, "parallel.shard_optimizer=true")
    worlds = [Communicator(), SimulatedRank(Rank(0, 2), run.recipe.parallel)]
    plans = [first_plan(run.recipe, run.prepared(), CPU, NAMED["float32"], world) for world in worlds]
    alone, shared = (plan.worst for plan in plans if plan is not None)
    assert (alone.rows, shared.rows) == (16, 8)
    assert 0.4 * alone.peak < shared.peak < 0.8 * alone.peak


@pytest.mark.parametrize(("name", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_the_limit_of_a_gpu_names_it_by_its_number(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, name: str, index: int
) -> None:
    limits: list[tuple[float, object]] = []
    real = H200._replace(memory=4 << 30)
    monkeypatch.setattr("econmt.budget.run_budget.limits_of", lambda _: real)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    budget = planned(2).trainer().budget
    budget.device = torch.device(name)
    with budget.enforced():
        assert limits == [(0.25, index)]
    assert limits[1:] == [(1.0, index)]
    with pytest.raises(KeyboardInterrupt), budget.enforced():
        raise KeyboardInterrupt
    assert limits[2:] == limits[:2]
    budget.plan = None
    with budget.enforced():
        assert not limits[4:]


@pytest.mark.cuda
def test_a_gpu_keeps_to_the_budget(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_outside(monkeypatch, 0, 0, 0)  # other tests may use the same GPU
    budget = 256 << 20
    run = make_run("training.device=cuda", f"training.memory_budget={budget}", *REAL)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run.train()
    assert torch.cuda.max_memory_reserved() <= budget


@pytest.mark.cuda
def test_a_gpu_that_is_full_learns_smaller_micro_batches(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_outside(monkeypatch, 0, 0, 0)
    trainer = planned(1, "training.device=cuda", *EXACT).trainer()
    trainer.budget.notes.clear()
    few, times = batch_of(trainer, range(30)), 4000
    names = ("source", "source_lengths", "target_input", "target_output", "target_lengths", "indices")
    many = {name: torch.cat([getattr(few, name)] * times) for name in names}
    batch = Batch(**many, source_tokens=times * few.source_tokens, target_tokens=times * few.target_tokens)
    (rows, source), target = batch.source.shape, batch.target_output.shape[1]
    plan = MemoryPlan(1 << 40, [BatchBudget(source, target, rows, 1, rows, 1, LEAN)], 3)
    trainer.budget.plan = plan
    gradients(trainer, [batch])  # now cuBLAS has its workspaces
    trainer.step.clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fixed = torch.cuda.memory_allocated()
    whole = {name: value.cpu() for name, value in gradients(trainer, [batch]).items()}
    assert trainer.budget.notes == []
    needed = torch.cuda.max_memory_allocated()
    assert needed - fixed > 200 << 20  # many segments of the allocator
    trainer.step.clear()
    torch.cuda.empty_cache()
    # Graphs of other tests may hold memory in which there is no tensor.
    plan.budget = (fixed + needed) // 2 + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    with trainer.budget.enforced():
        divided = gradients(trainer, [batch])
    assert trainer.budget.notes
    assert plan.find(batch).rows < rows
    for name, value in divided.items():
        torch.testing.assert_close(value.cpu(), whole[name], rtol=2e-2, atol=1e-3)


class AnotherRank(Communicator):
    """Rank 1 of two; rank 0 has another amount of memory outside of PyTorch's allocator, and this result."""

    rank, size = 1, 2

    def __init__(self, outside: int = 0, result: Any = None) -> None:
        self.outside, self.result = outside, result

    def all_reduce_max(self, *values: int) -> list[int]:
        return [max(value, self.outside) for value in values]

    def on_rank_zero(self, function: Callable[[], Any]) -> Any:
        return self.result


def budget_of(trainer: Trainer, communicator: Communicator) -> Budget:
    parameters = trainer.model.parameters()
    return Budget(
        trainer.task, trainer.prepared, trainer.batches, CPU, NAMED["float32"], parameters, communicator
    )


def test_ranks_refuse_a_budget_together(planned: Planned) -> None:
    trainer = planned(2).trainer()
    found = {"plan": trainer.budget.plan.state_dict()}
    budget_of(trainer, AnotherRank(result=found)).make(TrainingState(), 0)
    with pytest.raises(InputError, match=r"alone take .* beside 1 GiB outside"):
        budget_of(trainer, AnotherRank(1 << 30)).make(TrainingState(), 0)
    with pytest.raises(InputError, match=r"^too little$"):
        budget_of(trainer, AnotherRank(result={"error": ["too little"]})).make(TrainingState(), 0)


def test_rank_zero_decides_if_a_saved_plan_is_kept(planned: Planned) -> None:
    """Another rank may have another GPU."""
    trainer = planned(2).trainer()
    plan = trainer.budget.plan
    trainer.budget.store(trainer.state)
    other = plan.state_dict() | {"decoding_rows": plan.decoding_rows + 1}
    budget = budget_of(trainer, AnotherRank(result={"plan": other}))
    trainer.state.plan["made_for"] = budget._made_for(trainer.state.text)
    budget.make(trainer.state, 0)
    assert budget.plan.decoding_rows == plan.decoding_rows + 1


@pytest.mark.parametrize(
    ("valid", "test", "translated", "longest"),
    [
        (4, 9, 5, 9),
        (9, 4, 5, 9),
        (9, 4, 0, 4),
        (4, 9, 0, 9),
        (4, None, 0, 4),
        (4, None, -1, 4),
        (4, 9, -1, 9),
    ],
)
def test_the_longest_sentence_that_is_translated_counts(
    monkeypatch: pytest.MonkeyPatch, valid: int, test: int | None, translated: int, longest: int
) -> None:
    """Validation is translated if it is decoded, or if there is no test text; the test text always."""
    overrides = [f"training.decode_and_evaluate={translated}", "decoding.max_output_factor=3"]
    overrides.append("training.early_stopping.metric=perplexity")
    split = lambda length: SimpleNamespace(source_lengths=torch.tensor([1, length]))  # noqa: E731
    budget = object.__new__(Budget)
    side = SimpleNamespace(size=9)
    budget.recipe, budget.task = load_recipe("quickstart", overrides), SimpleNamespace(translates=True)
    budget.prepared = SimpleNamespace(
        valid=split(valid),
        test=None if test is None else split(test),
        vocabularies=SimpleNamespace(sides=(side, side), factor_sizes=()),
    )
    budget.device, budget._state = torch.device("cpu"), 0
    shapes: list[Any] = []
    monkeypatch.setattr(run_budget, "estimate_search", lambda *given: shapes.append(given[3]) or 1)
    monkeypatch.setattr(run_budget, "search_rows", lambda needed, *_: needed(7))
    assert budget._decoding_rows(1 << 30, 0) == 1
    assert shapes == [(7, longest + 1, 3 * longest + MAX_OUTPUT_EXTRA + 1)]
