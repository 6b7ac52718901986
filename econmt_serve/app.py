"""HTTP interface of the server: LibreTranslate's paths with further fields, metrics, and a page."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from econmt.api import EconmtError, requests
from econmt.api.checked_json import json_text, shortened
from econmt.api.commands import notice
from econmt.api.text import EMPTY, Translation
from econmt_serve import answers, files, queries
from econmt_serve.access import Keys, Rates
from econmt_serve.bodies import Bodies
from econmt_serve.file_processes import FileProcesses
from econmt_serve.file_worker import FileTask
from econmt_serve.metrics import Metrics
from econmt_serve.models import AUTO, LanguagePair, Served, TranslationJob
from econmt_serve.pages import page_files, specification
from econmt_serve.scheduler import Job, Scheduler
from econmt_serve.settings import Refused, Settings, Stopping, bug
from econmt_serve.text.division import division_of
from econmt_serve.text.passages import Hypothesis, hypothesis_of
from econmt_serve.unread import CloseUnread

_MOST_BYTES_A_CHARACTER = 12
"""Largest number of body bytes for a character: JSON writes one beyond U+FFFF as two escapes of six."""
_OTHER_BYTES = 1 << 18
"""Bytes of a body for more than the text, such as glossaries and constraints."""
_ADDRESS_CHARACTERS = 64
"""Characters kept of a client's address, which may be any text of a proxy."""
_FILE_BYTES = 1 << 24
"""Maximum number of bytes of a file."""
_FILE_SENTENCES = 500
"""Number of sentences of a file that wait at once, so that other clients' find room."""
_LEFT = 499
"""Status in the metrics of a request whose client left before its answer, as in nginx."""

Endpoint = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")


class Service:
    """Service that answers requests.

    Args:
        models: the models of each language pair. settings: limits of the server. keys: API keys.

    Attributes:
        failure: error that stopped the translating, or None.
        refused: number of requests that were refused because the server was stopping.
    """

    def __init__(self, models: Sequence[Served], settings: Settings, keys: Keys) -> None:
        self._models, self._settings, self._keys = list(models), settings, keys
        self._pairs = [pair for served in models for pair in served.pairs]
        self._metrics = Metrics()
        self._rates = Rates(settings.requests_per_minute)
        self._bodies = Bodies(settings.read_seconds)
        self._scheduler: Scheduler | None = None
        self._files: FileProcesses | None = None
        self.failure: BaseException | None = None
        self.refused = 0

    def application(self, stop: Callable[[], object] = lambda: None) -> Starlette:
        """Makes the ASGI application; calls ``stop`` if translating fails for good."""
        no_suggestions = Refused(403, "Suggestions are disabled on this server.")
        endpoints: dict[tuple[str, str], Endpoint] = {
            ("POST", "/translate"): self._translate,
            ("POST", "/translate_file"): self._translate_file,
            ("POST", "/detect"): self._detect,
            ("POST", "/suggest"): _always(answers.refusal(no_suggestions)),
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/frontend/settings"): self._frontend,
            ("GET", "/languages"): _always(answers.JsonResponse(answers.languages(self._pairs))),
            ("GET", "/health"): _always(answers.JsonResponse({"status": "ok"})),
            ("GET", "/spec"): _always(answers.JsonResponse(specification(keys=self._keys.wanted))),
            **{
                ("GET", path): _always(Response(content, media_type=kind, headers=answers.SAFE_HEADERS))
                for path, (content, kind) in page_files().items()
            },
        }

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self._scheduler = Scheduler(self._settings, self._metrics)
            self._files = FileProcesses()
            tasks = [asyncio.create_task(self._scheduler.run()), asyncio.create_task(self._watch())]

            def ended(task: asyncio.Task[None]) -> None:
                if not task.cancelled():
                    self.failure = task.exception()
                    stop()

            for task in tasks:
                task.add_done_callback(ended)
            yield
            self.refuse_rest()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        application = Starlette(
            routes=[
                Route(path, self._counted(path, endpoint), methods=[method])
                for (method, path), endpoint in endpoints.items()
            ],
            exception_handlers={HTTPException: _http_error, 500: _bug},
            middleware=[Middleware(CloseUnread)],
            lifespan=lifespan,
        )
        application.router.redirect_slashes = False  # a redirect repeats the whole address
        return application

    def refuse_files(self) -> None:
        """Refuses all files that are still being read, since the server is stopping."""
        if self._files is not None:
            self._files.stop(writing=False)

    def refuse_rest(self) -> None:
        """Refuses all requests that are not answered yet, since the server is stopping."""
        if self._files is not None and self._scheduler is not None:
            self._files.stop(writing=True)
            self._scheduler.stop()

    async def _watch(self) -> None:
        """Reloads models whenever their folders hold other parameters."""
        while True:
            await asyncio.sleep(self._settings.watch_seconds)
            for served in self._models:
                try:
                    if change := await asyncio.to_thread(served.reload):
                        self._metrics.reloads.labels("done").inc()
                        notice(change)
                except Exception as error:  # noqa: BLE001  a folder may hold anything, and the next check may succeed
                    self._metrics.reloads.labels("failed").inc()
                    kind = "" if isinstance(error, EconmtError) else f"{type(error).__name__}: "
                    notice(f"warning: the parameters before go on: {kind}{error}")

    def _counted(self, path: str, endpoint: Endpoint) -> Endpoint:
        """Returns an endpoint that turns errors into responses, and counts responses."""

        async def counted(request: Request) -> Response:
            begun, response = time.monotonic(), Response(status_code=500)
            try:
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=_LEFT)
            except EconmtError as error:
                self.refused += isinstance(error, Stopping)
                response = answers.refusal(error)
            finally:
                self._metrics.requests.labels(path, response.status_code).inc()
                self._metrics.seconds.labels(path).observe(time.monotonic() - begun)
            return response

        return counted

    @contextlib.asynccontextmanager
    async def _received(self, request: Request, most: int, *, is_file: bool) -> AsyncIterator[dict[str, Any]]:
        """Receives the fields of a body, which counts until the context is left, and checks the client's key and rate.

        A key in the head, or the rate where no key is needed, is checked before the body is read. For a key in the body
        the client's address must have requests left, and requests with a wrong key count.
        """
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        key = credentials.strip() if scheme.lower() == "bearer" else ""
        address = request.client.host[:_ADDRESS_CHARACTERS] if request.client else ""
        kind = request.headers.get("content-type", "")
        may_have_key = not is_file or kind.lower().startswith("multipart/")
        admitted = key != "" or not (self._keys.wanted and may_have_key)
        if admitted:
            self._admit(key, address)
        else:
            self._rates.take(address, 0.0)
        try:
            async with self._bodies.received(request, most) as content:
                tree = queries.read_tree(content, kind, is_file=is_file)
                if not admitted:
                    key = tree["api_key"] if isinstance(tree.get("api_key"), str) else ""
                    self._keys.check(key)
                    admitted = True
                    self._rates.take(key)
                yield tree
        except EconmtError:
            if not admitted:
                self._rates.take(address)
            raise

    def _admit(self, key: str, address: str) -> None:
        """Counts a request by its key, or by its address if the key is wrong or none is needed."""
        try:
            self._keys.check(key)
        except Refused:
            self._rates.take(address)
            raise
        self._rates.take(key if self._keys.wanted else address)

    async def _read(self, request: Request, kind: type[queries.BodyType]) -> queries.BodyType:
        """Returns the body of a request, with the client's key checked."""
        most = self._settings.max_characters * _MOST_BYTES_A_CHARACTER + _OTHER_BYTES
        async with self._received(request, most, is_file=False) as tree:
            return queries.checked_body(kind, tree)

    def _pair(self, source: str, target: str) -> LanguagePair:
        """Returns the pair of two languages; "auto" and "" fit any source and target."""
        source = source or AUTO
        fits = [each for each in self._pairs if source in (AUTO, each.source) and target in ("", each.target)]
        exact = [each for each in fits if each.source == source] or fits
        if len({(each.source, each.target) for each in exact}) == 1:
            return exact[0]  # the first model's
        named = [each for each in self._pairs if each.source == AUTO or not each.served.tags]
        hint = f"this server translates {', '.join(f'{each.source} to {each.target}' for each in named)}"
        known = {AUTO, "", *(code for each in self._pairs for code in (each.source, each.target))}
        for code in (source, target):
            if code not in known:
                raise Refused(400, f"{shortened(code)} is not supported", hint=hint)
        count = f"several pairs; name {'both' if target else 'the target'}" if fits else "no pair"
        raise Refused(400, f"source {source} and target {target or 'none'} fit {count}", hint=hint)

    async def _translate(self, request: Request) -> Response:
        begun = time.monotonic()
        body = await self._read(request, queries.TranslateBody)
        pair = self._pair(body.source, body.target)
        nbest, beam = body.alternatives + 1, pair.served.loaded.beam
        if nbest > beam:
            most = f"at most {beam - 1}, the beam keeps {beam} hypotheses"
            raise Refused(400, f"alternatives {body.alternatives}: {most}")
        division = division_of(pair.split_languages)
        texts = queries.texts_of(body, self._settings.max_characters, division, pair.source)
        lines = [line for text in texts for line in text.sentences]
        marked = [bool(each.marks) for text in texts for each in text.passage.sentences]
        tasks = [TranslationJob(nbest, (body.details and body.attention) or needed) for needed in marked]
        futures = self._submit(pair, lines, tasks)
        if body.stream:
            stream, kind = self._streamed(texts, futures, body, begun), "application/x-ndjson"
            return StreamingResponse(stream, media_type=kind, headers=answers.SAFE_HEADERS)
        translated = await _answers(request, futures)
        return answers.JsonResponse(_translations(texts, translated, body, pair, begun))

    async def _translate_file(self, request: Request) -> Response:
        """Translates a file in the body, alone or in a form; languages are in the form or the query."""
        assert self._files is not None
        async with self._received(request, _FILE_BYTES, is_file=True) as tree:
            body = queries.checked_body(queries.FileBody, {**request.query_params, **tree})
            queries.check_rules(body, self._settings.max_characters)
            pair = self._pair(body.source, body.target)
            content, content_type = body.file
            files.media_type(content_type)
            glossary = body.terms
            task = FileTask(content_type, pair.split_languages, self._settings.max_file_characters)
            sentences = await _unless_left(request, self._files.read(task, content))
            translations: list[Hypothesis] = []
            for first in range(0, len(sentences), _FILE_SENTENCES):
                part = sentences[first : first + _FILE_SENTENCES]
                plain = [requests.Request(text, avoid=body.avoid) for text, _ in part]
                lines = await asyncio.to_thread(queries.with_terms, plain, glossary, pair.source)
                tasks = [TranslationJob(attention=marked) for _, marked in part]
                found = await _answers(request, self._submit(pair, lines, tasks))
                translations += map(hypothesis_of, found)
            written, kind = await _unless_left(request, self._files.write(task, content, translations))
        headers = {**answers.SAFE_HEADERS, "Content-Disposition": "attachment", "Content-Type": kind}
        return Response(written, headers=headers)

    def _submit(
        self, pair: LanguagePair, lines: Sequence[requests.Request], tasks: Sequence[TranslationJob]
    ) -> list[asyncio.Future[Translation]]:
        """Queues lines; returns a future for each, which is done at once for a blank line."""
        assert self._scheduler is not None
        futures: list[asyncio.Future[Translation]] = []
        jobs: list[Job] = []
        served = pair.served
        for number, (line, task) in enumerate(zip(map(pair.tagged, lines), tasks, strict=True)):
            tokens = served.loaded.tokens(line, f"sentence {number + 1}")
            if tokens and line.text.strip():
                constrained = task._replace(constrained=not line.is_plain)
                jobs.append(Job(served, line, constrained, tokens, len(jobs)))
                futures.append(jobs[-1].answer)
            else:
                futures.append(asyncio.get_running_loop().create_future())
                futures[-1].set_result(EMPTY)
        self._scheduler.submit(jobs)
        return futures

    async def _streamed(
        self,
        texts: Sequence[queries.Text],
        futures: Sequence[asyncio.Future[Translation]],
        body: queries.TranslateBody,
        begun: float,
    ) -> AsyncIterator[str]:
        """Yields a line of JSON for each sentence, in order, as soon as it is translated."""
        waiting = iter(futures)
        try:
            line = 0
            for text in texts:
                for number, request, future in zip(text.passage.lines, text.sentences, waiting, strict=False):
                    translation = await future
                    fields = _streamed_fields(translation, request, body)
                    yield json_text({"line": line + number, **fields}) + "\n"
                line += text.passage.line_count
            yield json_text({"done": True, "milliseconds": _milliseconds(begun)}) + "\n"
        except EconmtError as error:
            self.refused += isinstance(error, Stopping)
            yield json_text(answers.complaint(error)) + "\n"
        finally:
            _forget(futures)

    async def _detect(self, request: Request) -> Response:
        await self._read(request, queries.DetectBody)
        sources = sorted({each.source for each in self._pairs} - {AUTO})
        if len(sources) > 1:
            raise Refused(501, f"give the source; this server does not tell {', '.join(sources)} apart")
        note = f"not detected: {sources[0]} is the only source language of this server"
        return answers.JsonResponse([{"language": sources[0], "confidence": 0.0, "note": note}])

    async def _show_metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _frontend(self, _: Request) -> Response:
        first, most = self._pairs[0], min(served.loaded.beam for served in self._models) - 1
        content = {
            "apiKeys": self._keys.wanted,
            "keyRequired": self._keys.wanted,
            "charLimit": self._settings.max_characters,
            "alternatives": most,
            "suggestions": False,
            "filesTranslation": True,
            "supportedFilesFormat": list(files.KINDS),
            "language": {"source": answers.language(first.source), "target": answers.language(first.target)},
        }
        return answers.JsonResponse(content)


def _always(response: Response) -> Endpoint:
    """Returns the endpoint of a response that stays the same."""

    async def endpoint(_: Request) -> Response:
        return response

    return endpoint


async def _answers(request: Request, futures: Sequence[asyncio.Future[Translation]]) -> list[Translation]:
    """Waits for the answer to each sentence, and cancels them if the client leaves."""
    try:
        return await _unless_left(request, asyncio.gather(*futures))
    finally:
        _forget(futures)


async def _unless_left(request: Request, result: Awaitable[Result]) -> Result:
    """Waits for a result; cancels it and raises ClientDisconnect if the client leaves."""
    leaving, waiting = asyncio.ensure_future(_leaves(request)), asyncio.ensure_future(result)
    leaving.add_done_callback(lambda _: waiting.cancel())
    try:
        return await waiting
    except asyncio.CancelledError:
        if leaving.done():
            raise ClientDisconnect from None
        raise
    finally:
        leaving.cancel()


def _forget(futures: Sequence[asyncio.Future[Translation]]) -> None:
    """Cancels what is not done yet."""
    for future in futures:
        if not future.cancel() and not future.cancelled():
            future.exception()  # asyncio logs errors that nobody has retrieved


async def _leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _milliseconds(begun: float) -> float:
    return round(1000.0 * (time.monotonic() - begun), 1)


def _streamed_fields(
    translation: Translation, line: requests.Request, body: queries.TranslateBody
) -> dict[str, Any]:
    """Returns the fields of one sentence of a stream."""
    fields: dict[str, Any] = {"translatedText": translation.text}
    if body.alternatives:
        fields["alternatives"] = [other.text for other in translation.hypotheses[1:]]
    if body.details:
        answers.check_details([translation] if body.attention else [])
        fields["details"] = answers.sentence(translation, line.passed, attention=body.attention)
    return fields


def _translations(
    texts: Sequence[queries.Text],
    translations: Sequence[Translation],
    body: queries.TranslateBody,
    pair: LanguagePair,
    begun: float,
) -> dict[str, Any]:
    """Returns the content of the response to a request, in LibreTranslate's form with the further fields."""
    if body.details and body.attention:
        answers.check_details(translations)
    rest = iter(translations)
    written, others, details = [], [], []
    for text in texts:
        sentences = [next(rest) for _ in text.sentences]
        written.append(text.passage.written(sentences))
        ranks = range(1, max((len(each.hypotheses) for each in sentences), default=0))
        others.append([text.passage.written(sentences, rank) for rank in ranks])
        if body.details:
            rows = zip(sentences, text.sentences, text.passage.lines, text.passage.gaps, strict=False)
            details.append(
                [
                    {"line": line, "before": before, "source": request.text}
                    | answers.sentence(each, request.passed, attention=body.attention)
                    for each, request, line, before in rows
                ]
            )
    content: dict[str, Any] = {"translatedText": written}
    if body.alternatives:
        content["alternatives"] = others
    if body.source == AUTO:
        content["detectedLanguage"] = [{"language": pair.source, "confidence": 0.0}] * len(texts)
    if body.details:
        content["details"] = details
    if not isinstance(body.q, list):
        content = {name: values[0] for name, values in content.items()}
    return {**content, "milliseconds": _milliseconds(begun)} if body.details else content


async def _http_error(_: Request, error: Exception) -> Response:
    """Returns the response to an error of the router."""
    assert isinstance(error, HTTPException)
    return answers.JsonResponse({"error": error.detail}, error.status_code, dict(error.headers or {}))


async def _bug(_: Request, error: Exception) -> Response:
    """Returns the response after a bug of this program; the traceback goes to standard error."""
    return answers.JsonResponse({"error": bug(error)}, 500)
