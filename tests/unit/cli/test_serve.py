"""``econmt serve``: what it refuses to begin with, and how it ends."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from econmt.api import commands
from econmt.config.recipe import load_recipe, recipe_text
from econmt_serve.command import _proxies
from econmt_serve.server import Server
from tests.conftest import PATIENCE, ROOT, econmt_environment
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.serving.conftest import Client
from tests.unit.serving.conftest import folder as folder


def test_what_cannot_be_served_is_told(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, keys = tmp_path / "nosuch", tmp_path / "keys"
    refused(call("serve --port 0 -m", missing), f"{missing}: no such model folder")
    keys.write_text("\n")
    refused(call("serve --port 0 -m", tmp_path, "--api-keys", keys), "no key in it")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = call("serve -m", tmp_path, "--port", port)
    refused(taken, f"127.0.0.1:{port} cannot be listened on (Address already in use); give another")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    lacking = "econmt serve needs the package uvicorn; pip install starlette uvicorn prometheus-client"
    assert call("serve -m", tmp_path).err == f"econmt: error: {lacking}\n"


@pytest.mark.parametrize("given", ["nonsense", "*", "10.0.0.1/8", "127.0.0.1, x" * 1000])
def test_proxies_are_addresses_or_networks(call: Call, tmp_path: Path, given: str) -> None:
    said = call("serve --port 0 -m", tmp_path, "--forwarded-allow-ips", given)
    refused(said, "econmt: error: --forwarded-allow-ips: '")
    assert said.err.endswith("' is no address and no network; name the proxies, as 127.0.0.1 or 10.0.0.0/8\n")


def test_proxies_of_ipv4_are_known_by_a_socket_of_ipv6() -> None:
    assert _proxies("") == []
    network, host = ("10.0.0.0/8", "::ffff:10.0.0.0/104"), ("192.0.2.1/32", "::ffff:192.0.2.1/128")
    assert _proxies("10.0.0.0/8, ::1,192.0.2.1") == [*network, "::1/128", *host]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_documented_unit_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    found = re.search(r"```ini\n(.*?)```", text, re.DOTALL)
    assert "--api-keys ${CREDENTIALS_DIRECTORY}/keys" in found[1]
    assert "\nLoadCredential=keys:/" in found[1]
    unit = tmp_path / "econmt.service"
    unit.write_text(found[1].replace("/opt/econmt/.venv/bin/econmt", sys.executable), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    rating = ["systemd-analyze", "security", "--offline=true", unit]
    done = subprocess.run(rating, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert float(re.search(r"exposure level .*: ([\d.]+)", done.stdout)[1]) < 3


def test_auto_is_8_bits_where_the_model_is_not_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pays = True
    monkeypatch.setattr(commands, "_prefers_int8", lambda: pays)
    folders = {
        "large": load_recipe("multi30k"),
        "small": load_recipe("quickstart", ["model.encoder.size=64", "model.decoder.size=64"]),
    }
    for name, recipe in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(recipe_text(recipe))

    def chosen(*names: str, **options: str) -> str:
        computing = commands.Computing(**{"device": "cpu", **options})  # type: ignore[arg-type]
        return commands.precision_for_sentences([tmp_path / name for name in names], computing)

    assert [chosen("large"), chosen("small"), chosen("large", "small")] == ["int8", "auto", "int8"]
    assert chosen("large", precision="bfloat16") == "bfloat16"
    pays = False
    assert chosen("large") == "auto"


@pytest.mark.parametrize(("address", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_who_may_ask_is_told_by_the_address_not_its_name(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, warned: bool
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    said = call("serve", "-m", tmp_path / "nosuch", "--host", "localhost.example.org", "--port", 0)
    assert ("anyone who reaches localhost.example.org can use the server" in said.err) == warned


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "all requests are answered"), (1, "1 request was refused"), (2, "2 requests were refused")],
)
def test_its_last_line_tells_what_it_refused(
    call: Call, folder: Path, count: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(server: Server, _: socket.socket) -> commands.Interrupts:
        server._service.refused = count
        return commands.Interrupts()

    monkeypatch.setattr(Server, "run", run)
    ended = call("serve --port 0 -m", folder)
    assert (ended.code, ended.err.splitlines()[-1]) == (0, f"econmt: stopped; {said}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.thorough)]
)
def test_a_signal_ends_it_when_all_is_answered(folder: Path, number: signal.Signals, code: int) -> None:
    options = ["--port", "0", "--threads", "1", "--wait-ms", "1000"]
    command = [sys.executable, "-m", "econmt", "serve", "-m", folder, *options]
    process = subprocess.Popen(command, env=econmt_environment(), stderr=subprocess.PIPE, text=True)
    with process:
        line = process.stderr.readline()
        found = re.fullmatch(r"econmt: listening on http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends\)\n", line)
        if found is None:
            process.kill()  # or leaving this block would wait for it
        assert found is not None, line
        client = Client(int(found[1]), None, [])
        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(client.post, "/translate", q="a b c\nd e")
            # The wait of a second keeps what is asked from being answered before the signal comes.
            while not asked.done() and b"econmt_waiting_sentences 2.0" not in client.get("/metrics").content:
                pass
            process.send_signal(number)
            answer = asked.result(PATIENCE)
        rest = process.stderr.read()
    assert (answer.status, answer.json["translatedText"].count("\n")) == (200, 1)
    assert process.returncode == code
    assert rest == "econmt: stopped; all requests are answered\n"
