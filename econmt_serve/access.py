"""API keys and rate limits."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from econmt.api import InputError
from econmt.api.commands import read_lines
from econmt_serve.settings import Refused

_REMEMBERED = 10_000
"""Maximum number of clients whose requests are counted; the one that was idle longest is dropped."""


class Keys:
    """API keys, of which a request must have one; without keys any request is allowed."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @property
    def wanted(self) -> bool:
        """True if requests need a key."""
        return bool(self._digests)

    def check(self, key: str) -> None:
        """Raises Refused if ``key`` is none of the keys; takes the same time for any wrong key."""
        digest = _digest(key)
        fits = [hmac.compare_digest(digest, each) for each in self._digests]
        if self.wanted and not any(fits):
            problem = "api_key is none of this server's" if key else "this server wants an api_key"
            raise Refused(403, f"{problem}; ask whoever runs it for one")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: Path) -> Keys:
    """Reads keys from a file, one a line; skips blank lines and lines that begin with ``#``."""
    lines = [line.strip() for line in read_lines(path)]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InputError(f"{path}: no key in it; write one a line, or leave the option out")
    return Keys(keys)


class Rates:
    """Rate limit of each client by a token bucket, which holds the requests of one minute; None: no limit."""

    def __init__(self, a_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = a_minute, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, requests: float = 1.0) -> None:
        """Counts a request, or none of ``requests`` 0; raises Refused if the client has none left."""
        if self._most is None:
            return
        now = self._clock()
        left, since = self._left.pop(client, (float(self._most), now))
        left = min(float(self._most), left + (now - since) * self._most / 60.0)
        self._left[client] = (left - requests if left >= 1.0 else left, now)
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)
        if left < 1.0:
            seconds = math.ceil((1.0 - left) * 60.0 / self._most)
            raise Refused(429, f"more than {self._most} requests a minute; ask again in {seconds} s", seconds)
