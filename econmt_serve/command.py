"""``econmt serve``: serves trained models over HTTP, with a page for the browser."""

from __future__ import annotations

import importlib.util
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

from econmt.api import InputError, TrainedModel, limits
from econmt.api.checked_json import shortened
from econmt.api.commands import (
    Computing,
    RestoreCase,
    WordLists,
    load_models,
    notice,
    option,
    precision_for_sentences,
    recipe_option,
)
from econmt_serve.settings import Settings

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
_DEFAULTS = Settings()


@dataclass(frozen=True)
class ServeComputing(Computing):
    """Device, threads and precision of a server."""

    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = option(
        "auto",
        help="Precision of matrix products; auto picks the fastest one on this device, on a CPU often int8. "
        "16 and 8 bits move scores by some hundredths.",
    )


@dataclass(frozen=True)
class RequestLimits:
    """Search options and limits of requests."""

    beam_size: int | None = recipe_option("decoding.beam_size", "--beam-size", "-b")
    batch_size: int | None = recipe_option("decoding.batch_size")
    wait_ms: Annotated[float, Field(ge=0.0, le=1000.0)] = option(
        _DEFAULTS.wait_ms, help="Milliseconds that a sentence waits for others to fill a batch."
    )
    max_characters: int = option(
        _DEFAULTS.max_characters,
        help="Maximum number of characters of a request.",
        min=1,
        max=limits.LINE_BYTES,
    )
    max_file_characters: int = option(
        _DEFAULTS.max_file_characters,
        help="Maximum number of characters in the text of a file.",
        min=1,
        max=limits.LINE_BYTES,
    )
    max_waiting: int = option(
        _DEFAULTS.max_waiting, help="Maximum number of waiting sentences.", min=1, max=limits.LINES
    )
    requests_per_minute: int | None = option(
        None,
        help="Maximum number of requests per minute of a client.",
        min=1,
        max=limits.LINES,
        show_default="any number",
    )


@dataclass(frozen=True)
class ServedText(WordLists):
    """Treatment of the text of all requests."""

    split_sentences: bool = option(
        True,
        "--split-sentences/--no-split-sentences",
        help="Split lines into sentences, which are translated one by one.",
    )
    restore_case: RestoreCase = False


def serve(
    models: list[Path] = option(
        ...,
        "--models",
        "--model",
        "-m",
        help="Model folder; may be repeated for several language pairs or for ensembles.",
    ),
    *,
    host: str = option("127.0.0.1", help="Address to listen on; the default is this machine alone."),
    port: int = option(5000, help="Port; 0: any free port.", min=0, max=65_535),
    api_keys: Path | None = option(None, help="File of API keys, one a line; requests need one of them."),
    text: ServedText,
    requests: RequestLimits,
    forwarded_allow_ips: str = option(
        "",
        help="Addresses or networks of proxies, separated by commas, whose X-Forwarded-For header names the client "
        "for --requests-per-minute.",
        show_default="none",
    ),
    computing: ServeComputing,
) -> None:
    """Answer translation requests over HTTP with LibreTranslate's interface, and serve a page for the browser.

    Requests of many clients are translated together. Better parameters in a model's folder are loaded as they appear.
    After Ctrl-C or SIGTERM the server answers earlier requests for up to 30 seconds, refuses the rest, and exits.

    \b
    Example:
      econmt serve -m runs/multi30k
      curl 127.0.0.1:5000/translate -d q="A dog runs." -d source=en -d target=de
    """
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"econmt serve needs the package {name}; pip install starlette uvicorn prometheus-client"
            )
    from econmt_serve.access import Keys, read_keys
    from econmt_serve.app import Service
    from econmt_serve.models import by_pair
    from econmt_serve.server import Server, bind, url_of

    def loaded(folders: Sequence[Path]) -> TrainedModel:
        precision = precision_for_sentences(folders, computing)
        return load_models(folders, Computing(computing.device, computing.threads, precision))

    avoid, glossary = text.read()
    settings = Settings(
        **vars(requests),
        split_sentences=text.split_sentences,
        restore_case=text.restore_case,
        avoid=avoid,
        glossary=glossary,
        glossary_mode=text.glossary_mode,
    )
    keys = Keys() if api_keys is None else read_keys(api_keys)
    proxies = _proxies(forwarded_allow_ips)
    with bind(host, port) as bound:
        address = bound.getsockname()[0]  # a name may stand for any
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback and not keys.wanted:
            notice(f"warning: anyone who reaches {host} can use the server; restrict it by --api-keys FILE")
        service = Service(by_pair(models, settings, loaded), settings, keys)
        server = Server(service, proxies)
        notice(f"listening on {url_of(bound)} (Ctrl-C ends)")
        interrupts = server.run(bound)
    refused = f"{service.refused} requests were refused" if service.refused != 1 else "1 request was refused"
    notice(f"stopped; {refused if service.refused else 'all requests are answered'}")
    if interrupts.pending and interrupts.name == "Ctrl-C":
        raise typer.Exit(interrupts.exit_code)


def _proxies(text: str) -> list[str]:
    """Returns the networks of trusted proxies, those of IPv4 also as an IPv6 socket shows them."""
    networks: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            network = ipaddress.ip_network(part)
        except ValueError:
            raise InputError(
                f"--forwarded-allow-ips: {shortened(part)!r} is no address and no network; name the proxies, as "
                "127.0.0.1 or 10.0.0.0/8"
            ) from None
        networks.append(str(network))
        if network.version == 4:
            networks.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return networks
