"""Sentences of many clients, translated together by the one thread that owns the models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from econmt.decoding.requests import Request
from econmt.engine.devices import is_out_of_memory
from econmt.errors import EconmtError
from econmt.serving.metrics import Metrics
from econmt.serving.models import Answer, Served, TranslationJob
from econmt.serving.settings import Refused, Settings, bug

_LOG = logging.getLogger(__name__)
_STEP_SECONDS = 0.01
"""Each further sentence of a request counts as if it came so much later: a long text does not stop the others."""


class Job:
    """A sentence that waits for its translation.

    Attributes:
        served, request, task: who shall do what.
        tokens: of the source.
        came: when it came, by ``time.monotonic``.
        due: as if it had come then.
        answer: what becomes of it; a client that leaves cancels it.
    """

    __slots__ = ("answer", "came", "due", "request", "served", "task", "tokens")

    def __init__(
        self, served: Served, request: Request, task: TranslationJob, tokens: int, number: int
    ) -> None:
        self.served, self.request, self.task, self.tokens = served, request, task, tokens
        self.came = time.monotonic()
        self.due = self.came + number * _STEP_SECONDS
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class Scheduler:
    """Decides what is translated next; all of it but the translating happens in the event loop's thread.

    Args:
        settings: of the server. metrics: what is counted.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._waiting: list[Job] = []
        self._running: Sequence[Job] = ()
        self._some = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, "translating")
        self._stopped = False

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes sentences, all or none.

        Raises:
            Refused: too many wait already, or the server stops.
        """
        if self._stopped:
            raise Refused(503, "the server is stopping; ask again when it is back", 5)
        if len(self._waiting) + len(jobs) > self._settings.most_waiting:
            self._forget_given_up()
        if len(self._waiting) + len(jobs) > self._settings.most_waiting:
            if len(jobs) > self._settings.most_waiting:
                raise Refused(
                    413,
                    f"{len(jobs):,} sentences, more than the {self._settings.most_waiting:,} that may wait; send parts",
                )
            raise Refused(503, f"{len(self._waiting):,} sentences wait already; ask again in a second", 1)
        self._waiting += jobs
        self._metrics.waiting.set(len(self._waiting))
        self._some.set()

    async def run(self) -> None:
        """Translates until it is cancelled; what still waits then is refused."""
        try:
            while True:
                while not self._waiting:
                    self._some.clear()
                    await self._some.wait()
                await self._let_gather()
                if batch := self._next():
                    await self._translate(batch)
        finally:
            self._stopped = True
            self._worker.shutdown(wait=False, cancel_futures=True)  # waiting would hold the event loop up
            for job in (*self._running, *self._waiting):
                if not job.answer.done():
                    job.answer.set_exception(
                        Refused(503, "the server is stopping; ask again when it is back", 5)
                    )
            self._waiting.clear()

    async def _let_gather(self) -> None:
        """Waits for more sentences, a few milliseconds, unless a batch is full already."""
        first = min(self._waiting, key=lambda job: job.due)
        left = first.came + self._settings.wait_seconds - time.monotonic()
        if left > 0.0 and len(self._waiting) < first.served.batch:
            await asyncio.sleep(left)

    def _next(self) -> list[Job]:
        """The sentence that has waited longest, and those that go best with it: of like length, asked the same."""
        self._forget_given_up()
        if not self._waiting:
            return []
        first = min(self._waiting, key=lambda job: job.due)
        alike = [job for job in self._waiting if job.served is first.served and job.task == first.task]
        alike.sort(key=lambda job: (abs(job.tokens - first.tokens), job.due))
        # Words are looked for by a batch of searches each.
        batch = alike[: 1 if first.task.words else first.served.batch]
        taken = set(map(id, batch))
        self._waiting = [job for job in self._waiting if id(job) not in taken]
        self._metrics.waiting.set(len(self._waiting))
        return batch

    def _forget_given_up(self) -> None:
        left = [job for job in self._waiting if not job.answer.done()]
        self._metrics.given_up.inc(len(self._waiting) - len(left))
        self._waiting = left
        self._metrics.waiting.set(len(left))

    async def _translate(self, batch: Sequence[Job]) -> None:
        served, task = batch[0].served, batch[0].task
        self._running = batch
        begun = time.monotonic()
        loop = asyncio.get_running_loop()
        answers: Sequence[Answer | EconmtError]
        try:
            answers = await loop.run_in_executor(
                self._worker, served.translate, [job.request for job in batch], task
            )
        except EconmtError as error:
            answers = [error] * len(batch)
        except Exception as error:  # noqa: BLE001  whatever is wrong with one batch must not end the others' server
            answers = [self._failure(error)] * len(batch)
        self._metrics.batches.observe(len(batch))
        self._metrics.batch_seconds.observe(time.monotonic() - begun)
        self._metrics.sentences.inc(len(batch))
        self._metrics.source_tokens.inc(sum(job.tokens for job in batch))
        for job, answer in zip(batch, answers, strict=True):
            if job.answer.done():
                continue
            if isinstance(answer, EconmtError):
                job.answer.set_exception(answer)
            else:
                job.answer.set_result(answer)

    def _failure(self, error: Exception) -> Refused:
        """Returns the answer for a batch that failed by no fault of its clients.

        Raises:
            RuntimeError: the device is lost to this process; only a new one can go on.
        """
        if is_out_of_memory(error):
            return Refused(503, "the server has no memory left for this; ask for less at a time", 5)
        self._metrics.bugs.inc()
        _LOG.error("a batch could not be translated", exc_info=error)
        if isinstance(error, RuntimeError) and "CUDA error" in str(error):
            raise error
        return Refused(500, bug(error))
