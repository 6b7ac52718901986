"""Measures a server under load, among it broken clients.

    python -m scripts.bench serve-load -m runs/multi30k --text multi30k/test_2016_flickr.en --seconds 300

One client first asks for one sentence after another; its answers are the expected ones. Then sentences come at a steady
rate, and then all clients ask as fast as they are answered, beside clients that are slow, dead or send garbage. The
exit code is 1 if an answer was lost or belongs to another sentence, if the server's memory grew, or if more than one
answer in a hundred differs from the expected one. In float32 none differs; in bfloat16 batches of another size round
differently, and of two translations with equal scores the other one may win.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from pathlib import Path

from econmt.bench.rows import Row
from econmt.data.text.corpus import read_lines
from econmt.errors import EconmtError
from econmt_ops.dispatch.timing import quantile
from scripts.bench.compare.measure import processor_seconds, resident_bytes
from scripts.bench.frame import Bench

WARM = 0.2
"""Share of the time in which memory may still grow, since allocators keep what a first crowd needs."""
GROWTH_BYTES = 32 << 20
OTHERWISE = "worded otherwise than when alone"
MOST_OTHERWISE = 0.01
TIMEOUT = 60.0


class Connection:
    """Connection of a client, which stays open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, text: str) -> str:
        """Returns the translation of a line; raises OSError or ValueError without a valid answer."""
        if self._streams is None or self._streams[0].at_eof():  # the server closes what is idle for long
            self.close()
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        body = json.dumps({"q": text}).encode()
        writer.write(head(len(body)) + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answer)
        if not answer.startswith(b"HTTP/1.1 200 ") or length is None:
            raise ValueError(answer.split(b"\r\n", 1)[0].decode())
        return str(json.loads(await reader.readexactly(int(length[1])))["translatedText"])

    def close(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def head(length: int) -> bytes:
    """Returns the head of a request with a body of so many bytes."""
    return (
        b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % length
    )


class Tally:
    """Results of the requests."""

    def __init__(self, expected: dict[str, str]) -> None:
        self.expected = expected
        self.seconds: list[float] = []
        self.wrong: Counter[str] = Counter()

    async def ask(self, connection: Connection, text: str) -> None:
        """Sends a request; notes time and answer."""
        begun = time.perf_counter()
        try:
            answer = await asyncio.wait_for(connection.ask(text), TIMEOUT)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
            self.wrong[f"lost: {type(error).__name__} {error}"] += 1
            connection.close()
            return
        self.seconds.append(time.perf_counter() - begun)
        if answer != self.expected[text]:
            others = answer in self.expected.values()
            self.wrong["another's" if others else OTHERWISE] += 1

    def row(self, name: str, span: Span) -> Row:
        """Returns a row of the table."""
        answers = len(self.seconds)
        row: Row = {"load": name, "answers": answers, "sentences/s": answers / span.seconds}
        row |= {"p50 ms": 1e3 * quantile(self.seconds, 0.5), "p99 ms": 1e3 * quantile(self.seconds, 0.99)}
        return row | {"CPU ms each": 1e3 * span.computing / answers, "wrong": sum(self.wrong.values())}


class Span:
    """Duration of a phase by the clock and by the server's processor time."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._begun = time.perf_counter(), processor_seconds(process)
        self.seconds = self.computing = 0.0

    def end(self) -> None:
        """Ends the phase."""
        self.seconds = time.perf_counter() - self._begun[0]
        self.computing = processor_seconds(self._process) - self._begun[1]


async def one_by_one(port: int, process: int, lines: Sequence[str]) -> tuple[dict[str, str], Tally, Span]:
    """Returns the translations of all lines when no other client asks."""
    connection, expected = Connection(port), dict[str, str]()
    for text in lines[:5]:
        await connection.ask(text)
    tally = Tally(expected)
    span = Span(process)
    for text in lines:
        start = time.perf_counter()
        expected[text] = await connection.ask(text)
        tally.seconds.append(time.perf_counter() - start)
    span.end()
    connection.close()
    return expected, tally, span


async def steadily(port: int, expected: dict[str, str], rate: float, seconds: float) -> Tally:
    """Sends sentences at random times, on average ``rate`` a second, without waiting for answers."""
    draw, tally = random.Random(1), Tally(expected)
    lines, free, running = list(expected), list[Connection](), set[asyncio.Task[None]]()

    async def one(text: str) -> None:
        connection = free.pop() if free else Connection(port)
        await tally.ask(connection, text)
        free.append(connection)

    begun = due = time.perf_counter()
    while due < begun + seconds:
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(one(draw.choice(lines)))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    for connection in free:
        connection.close()
    return tally


async def all_at_once(port: int, expected: dict[str, str], clients: int, seconds: float) -> Tally:
    """Runs clients that each ask again as soon as they are answered."""
    tally, lines, end = Tally(expected), list(expected), time.perf_counter() + seconds

    async def client(number: int) -> None:
        draw, connection = random.Random(number), Connection(port)
        while time.perf_counter() < end:
            await tally.ask(connection, draw.choice(lines))
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return tally


async def slow(port: int) -> None:
    """Sends a request a byte at a time, and reads nothing."""
    body = json.dumps({"q": "A slow man walks."}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    for byte in head(len(body)) + body:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)
    writer.close()


async def dead(port: int) -> None:
    """Asks for much and leaves at once."""
    body = json.dumps({"q": "A man leaves.\n" * 40}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(len(body)) + body)
    await writer.drain()
    writer.transport.abort()
    await asyncio.sleep(0.5)


async def garbage(port: int) -> None:
    """Sends what is no request, or none that can be done."""
    draw = random.Random(time.time_ns())
    rubbish = [draw.randbytes(200), head(5) + b"{{{{{", head(9) + b'{"q": 17}', b"GET /\x00 HTTP/1.1\r\n\r\n"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(draw.choice(rubbish))
    await asyncio.wait_for(reader.read(4096), 15)
    writer.close()
    await asyncio.sleep(0.1)


async def again_and_again(act: Callable[[int], Awaitable[None]], port: int) -> None:
    """Runs a client that misbehaves until it is stopped; the server may cut it off."""
    while True:
        try:
            await act(port)
        except (OSError, EOFError, asyncio.TimeoutError):
            await asyncio.sleep(0.1)


async def measure(bench: Bench, port: int, process: int, options: argparse.Namespace) -> int:
    """Measures all phases; returns the exit code."""
    lines = list(dict.fromkeys(filter(None, islice(read_lines(options.text), options.lines))))
    expected, alone, alone_span = await one_by_one(port, process, lines)
    steady_span = Span(process)
    steady = await steadily(port, expected, options.rate, min(60.0, options.seconds / 4))
    steady_span.end()
    acts = [slow, dead, garbage] * options.trouble
    troubles = [asyncio.create_task(again_and_again(act, port)) for act in acts]
    memory = list[int]()

    async def sample_memory() -> None:
        while True:
            memory.append(resident_bytes(Path(f"/proc/{process}/status").read_text())[0])
            await asyncio.sleep(options.seconds / 50)

    sampling = asyncio.create_task(sample_memory())
    crowd_span = Span(process)
    crowd = await all_at_once(port, expected, options.clients, options.seconds)
    crowd_span.end()
    for task in (sampling, *troubles):
        task.cancel()
    await asyncio.gather(sampling, *troubles, return_exceptions=True)
    rows = [alone.row("one by one", alone_span), steady.row(f"{options.rate:g} a second", steady_span)]
    bench.report([*rows, crowd.row(f"{options.clients} clients", crowd_span)])
    wrong = steady.wrong + crowd.wrong
    for what, count in wrong.items():
        print(f"{count} {what}")
    settled = memory[int(WARM * len(memory)) :]
    print(f"resident MB, every fiftieth of the time: {' '.join(str(each >> 20) for each in memory[::5])}")
    growth = settled[-1] - settled[0]
    print(f"after a fifth of it the memory went from {settled[0] >> 20} to {settled[-1] >> 20} MB")
    answers = len(steady.seconds) + len(crowd.seconds)
    otherwise = wrong.pop(OTHERWISE, 0)
    return int(bool(wrong) or otherwise > MOST_OTHERWISE * answers or growth > GROWTH_BYTES)


def main(words: Sequence[str] | None = None) -> int:
    bench = Bench(__doc__, seconds=300.0)
    add = bench.add_argument
    add("-m", "--model", required=True, action="append", help="model folder")
    add("--text", required=True, type=Path, help="source sentences, a line each, also .gz")
    add("--lines", type=int, default=300, help="sentences to use (%(default)s)")
    add("--clients", type=int, default=200, help="clients under full load (%(default)s)")
    add("--rate", type=float, default=20.0, help="sentences a second of the steady phase (%(default)s)")
    add("--trouble", type=int, default=2, help="slow, dead and garbling clients, of each kind (%(default)s)")
    add("options", nargs="*", help="after --: further options of econmt serve")
    options = bench.begin(words)
    models = [word for model in options.model for word in ("-m", model)]
    command = [sys.executable, "-m", "econmt", "serve", *models, "--port", "0", *options.options]
    environment = {**os.environ, "NO_COLOR": "1"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    said = server.stderr.readline()
    while server.poll() is None and "listening on" not in said:
        said = server.stderr.readline()
    address = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
    if address is None:
        raise EconmtError(said or "the server did not start")
    try:
        code = asyncio.run(measure(bench, int(address[1]), server.pid, options))
    finally:
        server.send_signal(signal.SIGTERM)
        rest = server.stderr.read()
        ended = server.wait()
    print(f"the server ended with exit code {ended}: {rest.strip()}")
    return code or ended
