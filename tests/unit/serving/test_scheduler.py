"""Which sentences are translated together, and what becomes of those that cannot be."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import pytest

from econmt.decoding.requests import Request
from econmt.decoding.translation import EMPTY
from econmt.errors import EconmtError, InputError
from econmt_serve.metrics import Metrics
from econmt_serve.models import TranslationJob
from econmt_serve.scheduler import Job, Scheduler
from econmt_serve.settings import Refused, Settings
from tests.conftest import PATIENCE


class Fake:
    """Answers with the text in capitals; the first batch waits until it is let go."""

    batch = 4

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.tasks: list[TranslationJob] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.error: Exception | None = None
        self.loaded = self

    def translate(self, requests: Sequence[Request], task: TranslationJob) -> list[Any]:
        self.batches.append([request.text for request in requests])
        self.tasks.append(task)
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return [
            InputError(f"no {request.text}")
            if request.text.startswith("bad")
            else EMPTY._replace(text=request.text.upper())
            for request in requests
        ]


class Table(NamedTuple):
    """A scheduler that runs, and who translates for it."""

    fake: Fake
    scheduler: Scheduler
    running: asyncio.Task[None]

    def job(self, text: str, tokens: int = 1, number: int = 0, **task: Any) -> Job:
        fake: Any = self.fake
        return Job(fake, Request(text), TranslationJob(**task), tokens, number)

    async def answers(self, *jobs: Job) -> list[Any]:
        """What jobs are answered that are submitted together, now that the worker goes on."""
        self.scheduler.submit(jobs)
        self.fake.go.set()
        return await asyncio.gather(*(job.answer for job in jobs))

    async def busy(self) -> Job:
        """The worker is at a sentence, and stays at it until ``fake.go`` is set."""
        job = self.job("first")
        self.scheduler.submit([job])
        while not self.fake.batches:
            await asyncio.sleep(0)
        return job


Test = Callable[[Table], Coroutine[Any, Any, None]]


def with_table(**settings: Any) -> Callable[[Test], Callable[[], None]]:
    """Makes a test of a coroutine, which gets a table of its own with these settings."""

    def decorate(test: Test) -> Callable[[], None]:
        async def main() -> None:
            scheduler = Scheduler(Settings(**{"wait_ms": 0.0, **settings}), Metrics())
            table = Table(Fake(), scheduler, asyncio.create_task(scheduler.run()))
            try:
                await test(table)
            finally:
                table.fake.go.set()
                table.running.cancel()
                await asyncio.gather(table.running, return_exceptions=True)

        return lambda: asyncio.run(asyncio.wait_for(main(), PATIENCE))

    return decorate


@with_table()
async def test_those_of_like_length_go_with_the_one_that_waits_longest(table: Table) -> None:
    """The metrics count them, and the first one."""
    await table.busy()
    lengths = [5, 50, 6, 49, 4, 51, 7, 48, 5]
    jobs = [table.job(f"{tokens}-{number}", tokens) for number, tokens in enumerate(lengths)]
    found = await table.answers(*jobs)
    assert [each.text for each in found] == [job.request.text.upper() for job in jobs]
    batches = [sorted(int(text.split("-")[0]) for text in batch) for batch in table.fake.batches[1:]]
    assert batches == [[4, 5, 5, 6], [48, 49, 50, 51], [7]]
    assert table.fake.threads == {"translating_0"}
    counted = table.scheduler._metrics.text().decode()
    for line in (
        "sentences_total 10.0",
        "source_tokens_total 226.0",
        "batch_sentences_sum 10.0",
        "batch_seconds_count 4.0",
    ):
        assert f"\neconmt_{line}\n" in counted
    assert 'econmt_batch_sentences_bucket{le="1.0"} 2.0' in counted
    assert "econmt_waiting_sentences 0.0" in counted


@with_table()
async def test_what_is_asked_differently_is_not_translated_together(table: Table) -> None:
    await table.busy()
    jobs = [table.job("a"), table.job("b", nbest=2), table.job("c"), table.job("d", constrained=True)]
    other: Any = Fake()
    other.go.set()
    await table.answers(*jobs, Job(other, Request("e"), TranslationJob(), 1, 0))
    assert (table.fake.batches[1:], other.batches) == ([["a", "c"], ["b"], ["d"]], [["e"]])


@with_table()
async def test_a_long_text_does_not_stop_others(table: Table) -> None:
    await table.busy()
    long = [table.job(f"long {number}", number=1000 * number) for number in range(40)]
    short = table.job("short")
    table.scheduler.submit(long)
    table.scheduler.submit([short])
    table.fake.go.set()
    await short.answer
    assert sum(job.answer.done() for job in long) < 10
    await asyncio.gather(*(job.answer for job in long))


@with_table(wait_ms=1000.0 * PATIENCE)
async def test_nothing_is_waited_for_when_there_is_a_batch(table: Table) -> None:
    table.fake.go.set()
    table.scheduler.submit([table.job(text, number=100_000) for text in "abcd"])
    for _ in range(9):
        await asyncio.sleep(0)
    assert not table.scheduler._waiting


@with_table(wait_ms=500.0 * PATIENCE)
async def test_sentences_that_come_within_the_wait_go_together(table: Table) -> None:
    table.fake.go.set()
    first, second = table.job("a"), table.job("b")
    table.scheduler.submit([first])
    await asyncio.sleep(0)
    table.scheduler.submit([second])
    table.running.get_loop().time = lambda: time.monotonic() + 0.6 * PATIENCE  # type: ignore[method-assign]
    await asyncio.gather(first.answer, second.answer)
    assert table.fake.batches == [["a", "b"]]


@with_table()
async def test_one_bad_sentence_stops_no_other(table: Table) -> None:
    table.fake.go.set()
    good, bad = table.job("good"), table.job("bad")
    table.scheduler.submit([good, bad])
    found: Any = await good.answer
    assert found.text == "GOOD"
    with pytest.raises(InputError, match="no bad"):
        await bad.answer


@with_table(max_waiting=3)
async def test_more_than_may_wait_are_refused_whole(table: Table) -> None:
    await table.busy()
    table.scheduler.submit([table.job("a"), table.job("b")])
    with pytest.raises(Refused, match="2 sentences wait already") as full:
        table.scheduler.submit([table.job("c"), table.job("d")])
    assert (full.value.status, full.value.retry_seconds) == (503, 1)
    with pytest.raises(Refused, match="4 sentences, more than the 3 that may wait") as long:
        table.scheduler.submit([table.job("e", number=number) for number in range(4)])
    assert long.value.status == 413
    await table.answers(table.job("f"))
    assert sorted(text for batch in table.fake.batches for text in batch) == ["a", "b", "f", "first"]


@with_table(max_waiting=3)
async def test_what_clients_gave_up_takes_no_place_from_others(table: Table) -> None:
    await table.busy()
    gone = [table.job(text) for text in "abc"]
    table.scheduler.submit(gone)
    for job in gone[:2]:
        job.answer.cancel()
    await table.answers(*(table.job(text) for text in "de"))
    await gone[2].answer
    assert sorted(text for batch in table.fake.batches for text in batch) == ["c", "d", "e", "first"]


@with_table()
async def test_a_batch_that_fails_leaves_the_server_at_work(table: Table) -> None:
    statuses = {EconmtError("not finite"): None, MemoryError(): 503, ValueError("a bug"): 500}
    for error, status in statuses.items():
        table.fake.error = error
        with pytest.raises(EconmtError) as failed:
            await table.answers(table.job("a"))
        assert getattr(failed.value, "status", None) == status
        table.fake.error = None
        (again,) = await table.answers(table.job("b"))
        assert again.text == "B"


@with_table()
async def test_a_lost_device_ends_it_and_leaves_nobody_waiting(table: Table) -> None:
    table.fake.error = RuntimeError("CUDA error: device-side assert triggered")
    first = await table.busy()
    other = table.job("waits")
    table.scheduler.submit([other])
    table.fake.go.set()
    for job in (first, other):
        with pytest.raises(Refused, match="stopping"):
            await job.answer
    with pytest.raises(RuntimeError, match="CUDA error"):
        await table.running
    with pytest.raises(Refused, match="stopping"):
        table.scheduler.submit([table.job("late")])


@with_table()
async def test_none_wait_when_all_were_given_up(table: Table) -> None:
    await table.busy()
    gone, metrics = table.job("gone"), table.scheduler._metrics
    table.scheduler.submit([gone])
    gone.answer.cancel()
    table.fake.go.set()
    while b"econmt_given_up_total 1.0" not in metrics.text():
        await asyncio.sleep(0)
    assert b"econmt_waiting_sentences 0.0" in metrics.text()


@with_table()
async def test_stopping_does_not_wait_for_what_is_being_translated(table: Table) -> None:
    first = await table.busy()
    table.running.cancel()
    await asyncio.gather(table.running, return_exceptions=True)
    assert not table.fake.go.is_set()
    with pytest.raises(Refused, match="stopping"):
        await first.answer


@with_table()
async def test_the_sentence_that_is_due_first_decides_though_another_came_first(table: Table) -> None:
    await table.busy()
    late = [table.job(f"late {number}", 9, number=1000 * number) for number in (5, 4, 3, 2, 1)]
    early = [table.job(f"early {number}", 50, number=number) for number in range(2)]
    await table.answers(*late, *early)
    first, last = ["early 0", "early 1", "late 1", "late 2"], ["late 3", "late 4", "late 5"]
    assert table.fake.batches[1:] == [first, last]
