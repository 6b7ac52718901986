"""Runs a small suite with the installed econmt: ``python tests/installed/smoke.py``.

It trains a tiny model, translates, scores, exports and serves, through the command line alone, and compares what has to
be equal. ``--ops`` is for an installation of ``econmt_ops`` alone, ``--library no`` for one without the C library. Each
step is a line on standard output; the first failure ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TEXT = "seven\ntwo hundred and thirty four\n\nninety one\n"
NEEDS_LIBRARY = "installed without its C library"
WAIT_SECONDS = 1800.0


class Failure(Exception):
    """One or several lines that tell what went wrong."""


class Suite:
    """Steps of the suite.

    Args:
        folder: folder that the steps write to.
        library: True if the C library is expected.
    """

    def __init__(self, folder: Path, *, library: bool) -> None:
        self.folder, self.library = folder, library
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.environment |= {"ECONMT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        (folder / "text.en").write_text(TEXT, encoding="utf-8")

    def run(self, *command: object, text: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs a command in the folder.

        Raises:
            Failure: it ended with another exit code than ``code``, or in a traceback.
        """
        words = [str(word) for word in command]
        place: dict[str, Any] = {"cwd": self.folder, "env": self.environment}
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=False, **place)
        if done.returncode != code or "Traceback" in done.stderr:
            problem = f"exit code {done.returncode}, not {code}"
            raise Failure(f"{' '.join(words)}\n{problem}\n{done.stdout}{done.stderr}")
        return done

    def econmt(self, *arguments: object, text: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs ``econmt`` as it was installed beside this Python."""
        return self.run(Path(sys.executable).parent / "econmt", *arguments, text=text, code=code)

    def train(self) -> None:
        """Trains a small model for a few updates, with pictures and TensorBoard's events."""
        keys = "output=model training.max_updates=20 training.checkpoint_interval=10 model.embedding=16"
        sizes = "model.encoder.size=16 model.decoder.size=16 model.attention.size=16"
        done = self.econmt("train", "quickstart", *keys.split(), *sizes.split())
        made = ("params.best.safetensors", "pictures/*.png", "tensorboard/events*", "hypotheses.test")
        for pattern in made:
            expect(any((self.folder / "model").glob(pattern)), f"training wrote no {pattern}")
        expect(done.stderr.count(NEEDS_LIBRARY) == int(not self.library), f"of the C library:\n{done.stderr}")
        self.econmt("train", "quickstart", *keys.split(), *sizes.split())  # goes on from the end

    def translate(self) -> None:
        """Translates a file to standard output, to a file and as JSON, which must agree."""
        expected = self._translated()
        expect(expected.count("\n") == TEXT.count("\n"), f"translations:\n{expected}")
        self.econmt("translate", "-m", "model", "-i", "text.en", "-o", "text.de", "--precision", "float32")
        expect((self.folder / "text.de").read_text(encoding="utf-8") == expected, "translate -o differs")
        rows = self._translated("--output-type", "json").splitlines()
        texts = "".join(json.loads(row)["translation"] + "\n" for row in rows)
        expect(texts == expected, f"translate --output-type json differs:\n{texts}\n{expected}")
        self.econmt("translate", "-m", "model", "--attention-picture", "attention.png", text="seven\n")
        expect((self.folder / "attention.png").stat().st_size > 1000, "no attention picture")

    def _translated(self, *more: str) -> str:
        """Returns the translations of the text."""
        options = ["-m", "model", "-i", "text.en", "--precision", "float32"]
        return self.econmt("translate", *options, *more).stdout

    def judge(self) -> None:
        """Scores and evaluates the translations, and describes the model."""
        references = "sieben\nzwei hundert\n\neins und neunzig\n"
        (self.folder / "reference.de").write_text(references, encoding="utf-8")
        scores = self.econmt("score", "-m", "model", "-s", "text.en", "-t", "reference.de").stdout.split()
        expect(len(scores) == TEXT.count("\n"), f"scores: {scores}")
        expect(all(float(score) <= 0.0 for score in scores), f"scores: {scores}")
        metrics = self.econmt("evaluate", "-r", "reference.de", "-i", "reference.de", "--json").stdout
        expect("100" in metrics, f"evaluate gives {metrics} for the references themselves")
        described = self.econmt("info", "model").stdout
        expect("attention" in described, "econmt info tells nothing of the attention")
        self.econmt("profile", "quickstart", "--estimate")

    def export(self) -> None:
        """Exports a folder and a file that translate without PyTorch, and compares their translations."""
        if not self.library:
            said = self.econmt("export", "--runtime", "model", "runtime", code=2).stderr
            expect(NEEDS_LIBRARY in said, said)
            return
        self.econmt("export", "--runtime", "model", "runtime")
        expected = self._translated()
        expect(self.run(sys.executable, "runtime", text=TEXT).stdout == expected, "python FOLDER differs")
        self.econmt("export", "--runtime", "model", "runtime.pyz")
        expect(self.run(sys.executable, "runtime.pyz", text=TEXT).stdout == expected, "python FILE differs")
        code = (
            "import sys, econmt_runtime\n"
            "found = econmt_runtime.load('runtime').translate(sys.stdin.read().split('\\n')[:-1])\n"
            "print(*(each.text for each in found), sep='\\n')\n"
            "assert 'torch' not in sys.modules"
        )
        expect(self.run(sys.executable, "-c", code, text=TEXT).stdout == expected, "econmt_runtime differs")

    def serve(self) -> None:
        """Starts the server, asks for a translation and ends it."""
        if importlib.util.find_spec("starlette") is None:
            said = self.econmt("serve", "-m", "model", code=2).stderr
            expect("econmt[serve]" in said, said)
            return
        expected = self._translated().splitlines()[0]
        with self._server() as address:
            request = json.dumps({"q": "seven", "source": "en", "target": "de"}).encode()
            translation = json.loads(get(f"{address}/translate", request))["translatedText"]
            problem = f"the server translates {translation!r}, econmt translate {expected!r}"
            expect(translation == expected, problem)
            for path in ("/", "/health", "/metrics", "/languages"):
                get(address + path)

    @contextlib.contextmanager
    def _server(self) -> Iterator[str]:
        """Runs the server; yields its address."""
        command = [Path(sys.executable).parent / "econmt", "serve", "-m", "model", "--port", "0"]
        words, log = [*map(str, command), "--precision", "float32"], self.folder / "serve.log"
        place: dict[str, Any] = {"cwd": self.folder, "env": self.environment}
        with log.open("wb") as stream:
            process = subprocess.Popen(words, stdout=stream, stderr=stream, **place)
        try:
            end = time.monotonic() + WAIT_SECONDS
            while (address := re.search(r"listening on (http://\S+:\d+)/", log.read_text())) is None:
                if process.poll() is not None or time.monotonic() > end:
                    raise Failure(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield address[1]
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=WAIT_SECONDS)
            expect(code == 0, f"the server ended with exit code {code}:\n{log.read_text()}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def extras(self) -> None:
        """Uses each optional package that is installed."""
        for package, code in EXTRAS.items():
            if importlib.util.find_spec(package) is not None:
                self.run(sys.executable, "-c", textwrap.dedent(code))

    def ops(self) -> None:
        """Computes with ``econmt_ops``, every implementation that this machine has, without ``econmt``."""
        self.run(sys.executable, "-c", textwrap.dedent(OPS.format(library=self.library)))


EXTRAS = {
    "pyarrow": """
        import pyarrow, pyarrow.parquet
        from pathlib import Path
        from econmt.data.text.corpus import find_corpus, read_pairs
        rows = {"en": ["a", "b"], "de": ["c", "d"]}
        pyarrow.parquet.write_table(pyarrow.table(rows), "pairs.parquet")
        corpus = find_corpus("pairs", "en", "de", [Path.cwd()], False)
        assert list(read_pairs(corpus)) == [("a", "c"), ("b", "d")]
    """,
    "py3langid": """
        import py3langid
        assert py3langid.classify("this is a sentence of the english language")[0] == "en"
    """,
    "huggingface_hub": """
        import huggingface_hub, econmt.cli.model_card
        assert callable(huggingface_hub.snapshot_download)
    """,
}

OPS = """
    import importlib.util, sys, torch, econmt_ops
    from econmt_ops.backends import c
    assert importlib.util.find_spec("econmt") is None
    assert c.is_built() is {library}
    torch.manual_seed(1)
    layer = econmt_ops.LSTM(4, 3, batch_first=True)
    inputs = torch.randn(2, 5, 4, requires_grad=True)
    found = {{}}
    for name in ("reference", "recompute", "auto"):
        layer.implementation = name
        outputs, _ = layer(inputs)
        (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs)
        found[name] = outputs, gradient
    for name in ("recompute", "auto"):
        for one, other in zip(found[name], found["reference"]):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    targets = torch.tensor([0, 8, 3, 3, 1, 2])
    loss = econmt_ops.linear_cross_entropy(hidden, weight, targets)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    decay = torch.rand(2, 7, 3)
    scanned = econmt_ops.linear_recurrence(decay, torch.ones(2, 7, 3))
    assert scanned.shape == (2, 7, 3)
    assert not any(name.partition(".")[0] in ("econmt", "pydantic", "typer") for name in sys.modules)
"""


def expect(holds: bool, what: str) -> None:
    """Raises Failure with ``what`` if something does not hold."""
    if not holds:
        raise Failure(what)


def get(address: str, body: bytes | None = None) -> bytes:
    """Returns the content of an answer with status 200; a body, which is JSON, is sent by POST."""
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.URLError as error:
        raise Failure(f"{address}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", action="store_true", help="test an installation of econmt_ops alone")
    text = "yes if econmt was installed with its C library"
    parser.add_argument("--library", choices=["yes", "no"], default="yes", help=text)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="econmt-smoke-") as folder:
        suite = Suite(Path(folder), library=given.library == "yes")
        steps: list[Callable[[], None]] = [suite.ops]
        if not given.ops:
            steps = [suite.train, suite.translate, suite.judge, suite.export, suite.serve, suite.extras]
        for step in steps:
            start = time.monotonic()
            try:
                step()
            except Failure as failure:
                print(f"  {step.__name__}: failed: {failure}", flush=True)
                return 1
            print(f"  {step.__name__}: {time.monotonic() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
