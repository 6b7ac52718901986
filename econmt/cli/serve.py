"""``econmt serve``: trained models behind HTTP, with a page."""

from __future__ import annotations

import importlib.util
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from econmt.api import TrainedModel
from econmt.checkpoint.folder import ModelFolder
from econmt.cli import controls, options
from econmt.cli.computing import load_models
from econmt.cli.options import within
from econmt.config import limits
from econmt.config.recipe import read_recipe
from econmt.config.yaml_reader import shortened
from econmt.data.files import notice
from econmt.engine.devices import resolve_device
from econmt.engine.precision import LEAST_SIZE, int8_pays
from econmt.errors import InputError
from econmt.training.interrupts import Interrupted, Interrupts

ServePrecisionOption = Annotated[
    controls.SearchPrecision,
    typer.Option(
        "--precision",
        help="Of products; auto: what is faster here, on a CPU often int8. bfloat16 and int8 move scores by some "
        "hundredths.",
    ),
]

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")

HostOption = Annotated[str, typer.Option(help="Address to listen on; the default is this machine alone.")]
PortOption = Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0: any that is free.")]
KeysOption = Annotated[
    Path | None, typer.Option(help="File of keys, one a line, of which a request needs one.")
]
WaitOption = Annotated[
    float,
    typer.Option(
        "--wait-ms",
        callback=within(0.0, 1000.0),
        help="Milliseconds for which a sentence waits for others to be translated with.",
    ),
]
CharactersOption = Annotated[
    int, typer.Option(min=1, max=limits.LINE_BYTES, help="Most characters of a request.")
]
WaitingOption = Annotated[int, typer.Option(min=1, max=limits.LINES, help="Most sentences that wait.")]
RateOption = Annotated[
    int | None,
    typer.Option(min=1, max=limits.LINES, help="Requests a minute of a client.", show_default="any number"),
]
ProxiesOption = Annotated[
    str,
    typer.Option(
        help="Addresses or networks of proxies, with commas, whose X-Forwarded-For header names the client for "
        "--requests-per-minute.",
        show_default="none",
    ),
]


def serve(
    models: Annotated[
        list[Path],
        typer.Option(
            "--models",
            "--model",
            "-m",
            help="Model folder; several: of each language pair, or an ensemble of one.",
        ),
    ],
    host: HostOption = "127.0.0.1",
    port: PortOption = 5000,
    api_keys: KeysOption = None,
    beam_size: controls.BeamOption = None,
    batch_size: options.BatchSizeOption = None,
    wait_ms: WaitOption = 3.0,
    max_characters: CharactersOption = 10_000,
    max_waiting: WaitingOption = 2_000,
    requests_per_minute: RateOption = None,
    forwarded_allow_ips: ProxiesOption = "",
    device: options.DeviceOption = "auto",
    threads: options.ThreadsOption = None,
    precision: ServePrecisionOption = controls.SearchPrecision.auto,
) -> None:
    """Answer translation requests over HTTP, in LibreTranslate's form, and show a page in the browser.

    Requests of many clients are translated together. When a model's folder gets better parameters they are taken up.
    Ctrl-C or SIGTERM answers what has been asked, and leaves.

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
    from econmt.serving.access import Keys, read_keys
    from econmt.serving.app import Service
    from econmt.serving.models import by_pair
    from econmt.serving.server import Server, bind, url_of
    from econmt.serving.settings import Settings

    # Once: a server that reloads a model must not change its mind.
    whole = precision.value == "auto" and resolve_device(device).type == "cpu" and int8_pays()

    def loaded(folders: Sequence[Path]) -> TrainedModel:
        chosen = "int8" if whole and not _is_tiny(folders) else precision.value
        return load_models(folders, None, device, chosen, threads)

    settings = Settings(
        beam_size, batch_size, wait_ms / 1000.0, max_characters, max_waiting, requests_per_minute
    )
    keys = Keys() if api_keys is None else read_keys(api_keys)
    proxies = _proxies(forwarded_allow_ips)
    with bind(host, port) as bound:
        address = bound.getsockname()[0]  # a name may stand for any
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback and not keys.wanted:
            notice(f"warning: whoever reaches {host} may ask; --api-keys FILE lets only those with a key")
        server = Server(Service(by_pair(models, settings, loaded), settings, keys), proxies)
        notice(f"listening on {url_of(bound)} (Ctrl-C ends)")
        interrupts = Interrupts()
        with interrupts:
            server.run(bound)
    if interrupts.pending and interrupts.name == "Ctrl-C":
        raise Interrupted("stopped by Ctrl-C; all that was asked is answered", interrupts.exit_code)
    notice("stopped; all that was asked is answered")


def _proxies(given: str) -> list[str]:
    """The networks of trusted proxies, and as a socket of IPv6 tells those of IPv4.

    Raises:
        InputError: something that is no address and no network.
    """
    networks: list[str] = []
    for part in filter(None, (part.strip() for part in given.split(","))):
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


def _is_tiny(folders: Sequence[Path]) -> bool:
    """Returns True if the models are so small that 8-bit products gain nothing for a single sentence."""
    files = [ModelFolder(folder).recipe for folder in folders]
    # Loading says what is wrong with a file.
    sizes = [read_recipe(file).model.widest for file in files if file.is_file()]
    return max(sizes, default=0) < LEAST_SIZE
