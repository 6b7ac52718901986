"""Sends malformed requests to a server of a tiny model over raw sockets, and checks its answers.

The server runs in this process with short limits. Each input is what one connection sends: bytes and pauses. Whatever
they are, the connection must end within a few seconds, every answer must be one that the documentation lists, an error
must be one printable line of JSON that does not repeat much of the request, and nothing may be logged. Between inputs
the server must still translate as before. The same seed gives the same inputs; one that fails is saved, and
``--again FILE`` sends it alone.

Examples:
    python scripts/fuzz_server.py --requests 2000
    python scripts/fuzz_server.py --again fuzz-failures/chunks-17.json
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import logging
import random
import re
import socket
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from fuzz import TinyModel, any_changes, any_text, changed_data, edited, edited_bytes, options_of, save

import econmt
from econmt.errors import printable
from econmt_serve import files as files_kind
from econmt_serve import server, unread
from econmt_serve.access import Keys
from econmt_serve.app import Service
from econmt_serve.models import by_pair
from econmt_serve.settings import Settings

Random = random.Random
Input = list[bytes]
"""Parts that a connection sends, with pauses between them."""

PAUSE_SECONDS = 0.05
MOST_SECONDS = 15.0
"""Most seconds from the last byte to the end of a connection."""
STATUSES = {100, 200, 400, 403, 404, 405, 408, 413, 415, 429, 503}
LIMITS = Settings(max_characters=500, read_seconds=0.4, max_file_characters=500)
BODY = {
    "q": ["a b", {"text": "b c d", "constraints": ["d"], "id": 3}], "source": "src", "target": "trg", "format": "text",
    "alternatives": 1, "target_prefix": "", "avoid": ["b"], "glossary": {"a": "d"}, "details": True, "stream": False,
    "api_key": "x",
}  # fmt: skip
PATHS = [
    *["/translate"] * 5, "/detect", "/health", "/metrics", "/languages", "/spec", "/", "/page.js", "/no",
]  # fmt: skip
LABELS = (
    "utf-8", "latin1", "cp1251", "koi8-r", "shift_jis", "gbk", "big5", "euc-kr", "iso-2022-jp", "utf-16", "utf-16be",
    "utf-32", "utf-7", "idna", "punycode", "unicode_escape", "raw_unicode_escape", "rot13", "zip", "hex", "mbcs",
    "undefined", "x-user-defined",
)  # fmt: skip
REPEATED = (
    "\n", "<p>", "<b>", "<i>a</i> ", "<img> ", "<a ", "<!--", "a. ", " ", "x", "&amp;", "<x{} translate=no>", "<a '\">",
)  # fmt: skip
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def request(
    draw: Random, body: bytes, *headers: bytes, path: str | None = None, length: bool = True
) -> bytes:
    """Makes a request with a body, well-formed except for the given headers."""
    lines = [b"POST %s HTTP/1.1" % (path or draw.choice(PATHS[:6])).encode(), b"Host: x", *headers]
    if not any(header.lower().startswith(b"content-type") for header in headers):
        lines.append(b"Content-Type: application/json")
    if length:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def fields(draw: Random) -> Input:
    """Makes a body with changed values."""
    return [request(draw, json.dumps(changed_data(draw, BODY)).encode())]


def text(draw: Random) -> Input:
    """Makes a body whose JSON is edited as text."""
    return [request(draw, edited(json.dumps(BODY), any_changes(draw)).encode("utf-8", "surrogatepass"))]


def json_values(draw: Random) -> Input:
    """Makes values on which JSON and Python differ: nesting, numbers, surrogates, duplicate keys."""
    size = draw.choice([10, 300, 900, 990, 1000, 5000, 100_000])
    value = draw.choice(
        [
            "[" * size + "]" * size,
            '{"a":' * size + "1" + "}" * size,
            "[" * size,
            "9" * size,
            "-" + "9" * size + ".5",
            "1e" + "9" * size,
            *("NaN", "-Infinity", "1e999", "-0", "01", "+1", "0x1", "nan", "True"),
            *('"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\u12"', '"\\x41"', "'a'", '"\t"'),
            '"' + "\u202e" * min(size, 20_000) + '"',
            '{"text": "a", "text": "b"}',
        ]
    )
    key = draw.choice(["q", "source", "alternatives", "avoid", "glossary", "details", "api_key", "id"])
    forms = '{"q": "a b", "%s": %s}', '{"q": {"text": "a", "%s": %s}}', '{"q": [{"text": "a", "%s": %s}]}'
    body = draw.choice(forms) % (key, value)
    return [request(draw, body.encode("utf-8", "surrogatepass"), path="/translate")]


def encodings(draw: Random) -> Input:
    """Makes a body in another encoding, or with the wrong one declared."""
    encoding = draw.choice(["utf-16", "utf-32", "latin-1", "utf-8-sig"])
    body = draw.choice(
        [
            json.dumps({"q": "a ß"}, ensure_ascii=False).encode(encoding),
            b'{"q": "\xc0\xaf\xed\xa0\x80"}',
            draw.randbytes(draw.randrange(200)),
            b"q=%ff&source=%zz&target=%",
            b"&" * 5000,
            b"q=a&" * 50,
            b"q=a&alternatives=" + b"9" * draw.choice([3, 400, 6000]),
            "q=a&alternatives=٣".encode(),
        ]
    )
    kinds = [b"application/json; charset=utf-7", b"application/x-www-form-urlencoded", b"multipart/form-data"]
    kinds += [b"", b"application/json; boundary=\xff", b"APPLICATION/JSON", b"x" * 30_000]
    return [request(draw, body, b"Content-Type: " + draw.choice(kinds), b"Content-Encoding: gzip")]


def chunks(draw: Random) -> Input:
    """Makes a body in chunks, some with invalid sizes."""
    sizes = [*b"0 -1 5 zz 0x5 +5 1_0 5 5 FFFFFFF".split(), b"", b"5;" + b"x" * 30_000, b"F" * 17, b"F" * 100]
    sizes += [b"5 ", b"5\n", b"\xff"]
    parts = [request(draw, b"", b"Transfer-Encoding: chunked", length=False)]
    ends = [b"\r\n", b"\r\n", b"\n", b""]
    parts += [draw.choice(sizes) + draw.choice(ends) + b'{"q":\r\n' for _ in range(draw.randrange(1, 6))]
    if draw.random() < 0.3:
        parts.append(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        parts *= draw.choice([1, 8])
    if draw.random() < 0.5:
        parts.append(draw.choice([b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\n" + b"X: y\r\n" * 9000, b"0"]))
    return parts if draw.random() < 0.2 else [b"".join(parts)]


def lengths(draw: Random) -> Input:
    """Makes a body with an invalid, wrong or duplicate length."""
    values = [*b"-1 +5 0x5 abc 1e3 100".split(), b"5, 5", b"5, 6", b"", b"9" * 20, b"9" * 5000, b"\xb2"]
    headers = [b"Content-Length: " + draw.choice(values) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.3:
        codings = [b"chunked", b"identity", b"gzip, chunked", b"chunked\x0b"]
        headers.append(b"Transfer-Encoding: " + draw.choice(codings))
    return [request(draw, b'{"q": "a"}', *headers, length=draw.random() < 0.2)]


def heads(draw: Random) -> Input:
    """Makes a head that is too long, too short or malformed."""
    sort = [
        b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * draw.choice([100, 70_000])),
        b"GET / HTTP/1.1\r\nHost: x\r\n"
        + b"X-%d: y\r\n" % draw.randrange(9) * draw.choice([50, 20_000])
        + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * draw.choice([1000, 200_000]) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(50),
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\nno colon\r\n\r\n",
        b"GET http://x/%2e%2e/%00%0d%0aSet-Cookie:a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET //evil.example/.. HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"HEAD /health HTTP/1.0\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\r\n" * draw.choice([1, 50_000]),
        draw.randbytes(draw.randrange(1, 300)),
    ]
    return [draw.choice(sort)]


def headers(draw: Random) -> Input:
    """Makes duplicate headers and headers of other protocols."""
    choices = b"""Authorization: Bearer \xff|Authorization: Bearer|authorization: bearer x|Authorization: Basic eA==
Content-Type: text/plain|Content-Type: application/json|Host: y|Expect: 100-continue|Connection: close
Forwarded: for=\xff|Cookie: \x01|X-Forwarded-Proto: file|Transfer-Encoding: chunked|Content-Length: 3
Accept-Encoding: *|Range: bytes=0-""".replace(b"\n", b"|").split(b"|")
    choices += [b"Connection: upgrade\r\nUpgrade: " + kind for kind in (b"websocket", b"h2c")]
    choices.append(b"X-Forwarded-For: " + b"1, " * 5000)
    body = draw.choice([b'{"q": "a b"}', b"", b"q=a"])
    return [request(draw, body, *draw.choices(choices, k=draw.randint(1, 6)), path=draw.choice(PATHS))]


def pipelined(draw: Random) -> Input:
    """Makes many requests at once."""
    kinds = [fields, text, lengths, heads, headers]
    made = [b"".join(draw.choice(kinds)(draw)) for _ in range(draw.randrange(1, 5))]
    plain = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % draw.choice(PATHS[7:]).encode()
    made += [plain] * draw.choice([1, 5, 200])
    draw.shuffle(made)
    return [b"".join(made)]


def slow(draw: Random) -> Input:
    """Makes a request that is sent part by part, often without its end."""
    message = b"".join(draw.choice([fields, chunks, lengths, heads, headers])(draw))[:5000]
    cuts = sorted(draw.randrange(len(message) + 1) for _ in range(draw.randrange(1, 12)))
    parts = [message[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(message)], strict=True)]
    return parts[: draw.randint(1, len(parts))]


def damaged(draw: Random) -> Input:
    """Makes a request with some bytes changed."""
    kind = draw.choice([fields, chunks, lengths, heads, headers, encodings])
    return [edited_bytes(b"".join(kind(draw)), any_changes(draw))]


def markup(draw: Random) -> Input:
    """Makes malformed HTML and texts of special characters."""
    parts = [
        "<b>", "</b>", "<!--", "-->", "<![CDATA[", "<script>", "&#x110000;", "&amp", "<", "<a href='",
        "a b", "\n",
    ]  # fmt: skip
    parts += [any_text(draw)[:20] for _ in range(4)]
    q = "".join(draw.choices(parts, k=draw.choice([3, 20, 200])))[:500]
    kind = draw.choice(["html", "text"])
    body = {"q": q, "format": kind, "glossary": {draw.choice(parts): "d"} if draw.random() < 0.3 else {}}
    return [request(draw, json.dumps(body).encode(), path="/translate")]


def document(xml: str) -> bytes:
    """Makes a Word document with the text of ``xml`` in its body."""
    written = io.BytesIO()
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    with zipfile.ZipFile(written, "w") as archive:
        entry = zipfile.ZipInfo("word/document.xml")  # with a date of its own, not of now
        archive.writestr(entry, f'<w:document xmlns:w="{space}">{xml}</w:document>')
    return written.getvalue()


def files(draw: Random) -> Input:
    """Makes files to translate, some of them damaged."""
    tags = [
        "<w:p>", "</w:p>", "<w:r>", "</w:r>", "<w:t>", "</w:t>", "<w:tab/>", "<w:rPr><w:b/></w:rPr>", "a b",
        "&#57344;0&#57345;",
    ]  # fmt: skip
    sound = "<w:p><w:r><w:t>a b. </w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t>c</w:t></w:r></w:p>"
    xml = sound if draw.random() < 0.5 else "".join(draw.choices(tags, k=draw.choice([3, 12])))
    kind = draw.choice([files_kind.WORD, "text/html", "text/plain", "image/png"])
    content = document(xml) if kind == files_kind.WORD else any_text(draw)[:200].encode("utf-8", "replace")
    if draw.random() < 0.5:
        content = edited_bytes(content, any_changes(draw))
    return [file_request(draw, content, kind)]


def file_request(draw: Random, content: bytes, kind: str) -> bytes:
    """Makes a request to translate a file."""
    query = draw.choice(["", "", "?source=src&target=trg", "?target=no", "?source=%ff"])
    return request(draw, content, f"Content-Type: {kind}".encode(), path=f"/translate_file{query}")


def encoded_files(draw: Random) -> Input:
    """Makes texts and pages in many encodings, declared rightly, wrongly or twice."""
    label, other = draw.choices(LABELS, k=2)
    page = (
        draw.choice(["", f"<meta charset={label}>", f'<meta content="a; charset={label}">'])
        + "<p>a b <b>c</b>"
    )
    page += draw.choice(["", "\u00fc", "\u0434\u0430", "\u65e5\u672c", "\U0001f600", any_text(draw)[:50]])
    try:
        content = page.encode(draw.choice([label, other]), "xmlcharrefreplace")
    except (LookupError, UnicodeError):
        content = page.encode("utf-8", "replace")
    mark = draw.choice([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b"])
    kind = draw.choice(["text/html", "text/plain"])
    parameter = draw.choice(["", f"; charset={label}", f'; charset="{other}"', "; charset=", "; charset"])
    return [file_request(draw, mark + content, kind + parameter)]


def large_files(draw: Random) -> Input:
    """Makes files of one piece again and again, which a reader should read once."""
    piece, size = draw.choice(REPEATED), draw.choice([1000, 50_000, 300_000])
    pieces = [piece.replace("{}", str(number)) for number in range(size // len(piece))]
    if draw.random() < 0.5:
        return [file_request(draw, "".join(pieces).encode(), draw.choice(["text/html", "text/plain"]))]
    run = "<w:r>{}<w:t>a </w:t></w:r>"
    runs = [run.format(""), run.format("<w:rPr><w:b/></w:rPr>"), "\n", "<w:p><w:r><w:rPr>"]
    xml = "".join(draw.choices(runs, k=2)) * (size // 40)
    return [file_request(draw, document(draw.choice([f"<w:p>{xml}</w:p>", xml])), files_kind.WORD)]


KINDS: dict[str, Callable[[Random], Input]] = {
    made.__name__: made
    for made in (
        *(fields, text, json_values, encodings, chunks, lengths, heads, headers),
        *(pipelined, slow, damaged, markup, files, encoded_files, large_files),
    )
}


def any_input(draw: Random) -> tuple[str, Input]:
    """Makes an input of any kind; two of three end with a request that closes the connection."""
    name = draw.choice(list(KINDS))
    parts = [part for part in KINDS[name](draw) if part]
    return name, [*parts, LAST] if draw.random() < 2 / 3 else parts


class Logged(logging.Handler):
    """Handler that keeps all log records; there should be none."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record."""
        self.lines.append(self.format(record))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[int]:
    """Runs a server with short limits in a thread; yields its port."""
    server._HEAD_SECONDS, server._WRITE_SECONDS, server._IDLE_SECONDS = 0.4, 1.0, 1
    unread.LINGER_SECONDS = 0.2
    service = Service(by_pair([folder], LIMITS, lambda folders: econmt.load(list(folders))), LIMITS, Keys())
    running = server.Server(service)
    with server.bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=running.run, args=[bound])
        thread.start()
        try:
            yield bound.getsockname()[1]
        finally:
            running.stop()
            thread.join(60)


def exchange(port: int, parts: Input) -> tuple[bytes, float | None]:
    """Returns the answer to one connection, and the seconds until it ended; None if it did not."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=MOST_SECONDS) as connection:
        with contextlib.suppress(ConnectionError):
            for part in parts[:-1]:
                connection.sendall(part)
                time.sleep(PAUSE_SECONDS)
            connection.sendall(b"".join(parts[-1:]))
        began = time.monotonic()
        connection.settimeout(0.5)
        while time.monotonic() < began + MOST_SECONDS:
            block = b""
            try:
                block = connection.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            if not block:
                return said, time.monotonic() - began
            said += block
    return said, None


def complaint(said: bytes, seconds: float | None) -> str | None:
    """Returns what is wrong with an answer; None if nothing is."""
    if seconds is None:
        return "the connection did not end"
    for head, body in re.findall(
        rb"HTTP/1\.1 (\d{3} .*?)\r\n\r\n(.*?)(?=HTTP/1\.1 \d{3} |\Z)", said, re.DOTALL
    ):
        status = int(head[:3])
        if status not in STATUSES:
            return f"status {status}: {body[:200]!r}"
        if status >= 400 and b"application/json" in head and body:
            line = json.loads(body)["error"]
            if printable(line) != line or len(line) > 1000:
                return f"an error that is no printable line: {line[:200]!r}"
    if said and not said.startswith(b"HTTP/1.1 "):
        return f"no HTTP: {said[:100]!r}"
    return None


def run_all(port: int, options: argparse.Namespace, logged: Logged) -> int:
    """Sends inputs, several at a time, and prints how many of each kind there were; 1 if any failed."""
    draw, counts, statuses, failed = Random(options.seed), Counter[str](), Counter[str](), 0
    good = request(draw, b'{"q": "a b"}', b"Connection: close", path="/translate")
    expected = exchange(port, [good])[0].partition(b"\r\n\r\n")[2]
    slowest = 0.0
    inputs = [any_input(draw) for _ in range(options.requests)]
    with ThreadPoolExecutor(16) as senders:
        answers = senders.map(lambda each: exchange(port, each[1]), inputs)
        for number, ((name, parts), (said, seconds)) in enumerate(zip(inputs, answers, strict=True)):
            counts[name] += 1
            statuses.update(status.decode() for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", said))
            slowest = max(slowest, seconds or MOST_SECONDS)
            failure = complaint(said, seconds)
            if number % 50 == 49 and exchange(port, [good])[0].partition(b"\r\n\r\n")[2] != expected:
                failure = "the server does not translate as before"
            if logged.lines:
                failure = f"logged: {logged.lines.pop()[-6000:]}"
            if failure is not None:
                failed += 1
                record = [base64.b64encode(part).decode() for part in parts]
                save(options.failures, f"{name}-{number}", record, failure)
    print(
        f"seed {options.seed}: {len(inputs):,} connections, {failed} failed; the last ended after {slowest:.1f} s"
    )
    print("  kinds:    " + ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    print("  answers:  " + ", ".join(f"{name} {count:,}" for name, count in sorted(statuses.items())))
    return int(failed > 0)


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--requests", type=int, default=500, help="number of connections (500)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logged = Logged()
    logging.getLogger().addHandler(logged)
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.redirect_stderr(io.StringIO()),
        serving(TinyModel(Path(name)).run) as port,
    ):
        if options.again is None:
            return run_all(port, options, logged)
        parts = [base64.b64decode(part) for part in json.loads(options.again.read_text(encoding="utf-8"))]
        said, seconds = exchange(port, parts)
        print(printable(said[:5000].decode("latin-1")), seconds, *logged.lines, sep="\n")
        failure = complaint(said, seconds)
        print(failure or "it passes")
        return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
