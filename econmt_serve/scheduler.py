"""Queue of sentences from many clients, which one thread translates in batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from econmt.api import EconmtError, Request, is_out_of_memory
from econmt.api.text import Translation
from econmt_serve.metrics import Metrics
from econmt_serve.models import Served, TranslationJob
from econmt_serve.settings import Refused, Settings, Stopping, bug

_LOG = logging.getLogger(__name__)
_STEP_SECONDS = 0.01
"""Seconds that each further sentence of a request stands back in the queue, so that long texts delay no others."""


class Job:
    """Sentence that waits for its translation.

    Attributes:
        came: time of arrival, by ``time.monotonic``. due: time that decides the order.
        answer: future of the answer; it is cancelled if the client leaves.
    """

    __slots__ = ("answer", "came", "due", "request", "served", "task", "tokens")

    def __init__(
        self, served: Served, request: Request, task: TranslationJob, tokens: int, number: int
    ) -> None:
        self.served, self.request, self.task, self.tokens = served, request, task, tokens
        self.came = time.monotonic()
        self.due = self.came + number * _STEP_SECONDS
        self.answer: asyncio.Future[Translation] = asyncio.get_running_loop().create_future()


class Scheduler:
    """Queue whose sentences are translated in batches by a worker thread; everything else runs in the event loop."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._waiting: list[Job] = []
        metrics.waiting.set_function(lambda: len(self._waiting))
        self._running: Sequence[Job] = ()
        self._not_empty = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, "translating")
        self._stopped = False

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues all sentences; raises Refused if too many wait already, or the server is stopping."""
        if self._stopped:
            raise Stopping
        most = self._settings.max_waiting
        if len(self._waiting) + len(jobs) > most:
            self._forget_given_up()
        if len(jobs) > most:
            raise Refused(413, f"{len(jobs):,} sentences, more than the {most:,} that may wait; send parts")
        if len(self._waiting) + len(jobs) > most:
            raise Refused(503, f"{len(self._waiting):,} sentences wait already; ask again in a second", 1)
        self._waiting += jobs
        self._not_empty.set()

    async def run(self) -> None:
        """Translates until it is cancelled; sentences that still wait then are refused."""
        try:
            while True:
                while not self._waiting:
                    self._not_empty.clear()
                    await self._not_empty.wait()
                await self._let_gather()
                if batch := self._next():
                    await self._translate(batch)
        finally:
            self.stop()

    def stop(self) -> None:
        """Refuses all sentences, those that are being translated too."""
        self._stopped = True
        self._worker.shutdown(wait=False, cancel_futures=True)  # waiting would block the event loop
        for job in (*self._running, *self._waiting):
            if not job.answer.done():
                job.answer.set_exception(Stopping())
        self._waiting.clear()

    async def _let_gather(self) -> None:
        """Waits a few milliseconds for more sentences, unless there are enough for a batch."""
        first = min(self._waiting, key=lambda job: job.due)
        seconds = first.came + self._settings.wait_ms / 1000.0 - time.monotonic()
        if seconds > 0.0 and len(self._waiting) < first.served.loaded.batch:
            await asyncio.sleep(seconds)

    def _next(self) -> list[Job]:
        """Returns the sentence that has waited longest, with others of the same kind and of similar length."""
        self._forget_given_up()
        if not self._waiting:
            return []
        first = min(self._waiting, key=lambda job: job.due)
        alike = [job for job in self._waiting if job.served is first.served and job.task == first.task]
        alike.sort(key=lambda job: (abs(job.tokens - first.tokens), job.due))
        batch = alike[: first.served.loaded.batch]
        taken = set(map(id, batch))
        self._waiting = [job for job in self._waiting if id(job) not in taken]
        return batch

    def _forget_given_up(self) -> None:
        remaining = [job for job in self._waiting if not job.answer.done()]
        self._metrics.given_up.inc(len(self._waiting) - len(remaining))
        self._waiting = remaining

    async def _translate(self, batch: Sequence[Job]) -> None:
        served, task = batch[0].served, batch[0].task
        self._running = batch
        begun = time.monotonic()
        loop = asyncio.get_running_loop()
        answers: Sequence[Translation | EconmtError]
        requests = [job.request for job in batch]
        try:
            answers = await loop.run_in_executor(self._worker, served.loaded.translate, requests, task)
        except EconmtError as error:
            answers = [error] * len(batch)
        except Exception as error:  # noqa: BLE001  an error in one batch must not end the server
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
        """Returns the error for the clients of a batch that failed; raises it if the device cannot be used any more."""
        if is_out_of_memory(error):
            return Refused(503, "the server has no memory left for this; ask for less at a time", 5)
        self._metrics.bugs.inc()
        _LOG.error("a batch could not be translated", exc_info=error)
        if isinstance(error, RuntimeError) and "CUDA error" in str(error):
            raise error
        return Refused(500, bug(error))
