"""Settings of the server, and its refusals."""

from __future__ import annotations

from typing import NamedTuple

from econmt.errors import InputError


class Settings(NamedTuple):
    """The limits of a server.

    Attributes:
        beam_size: hypotheses kept by the search, which bounds the alternatives; None: the recipe's.
        batch_size: sentences translated together; None: the recipe's.
        wait_seconds: how long a sentence waits for others to be translated with.
        most_characters: of the text of a request.
        most_waiting: sentences that wait to be translated, of all clients.
        requests_a_minute: of a client; None: any number.
        read_seconds: for the whole of a request to arrive.
        watch_seconds: between looks at the model folders for better parameters.
    """

    beam_size: int | None = None
    batch_size: int | None = None
    wait_seconds: float = 0.003
    most_characters: int = 10_000
    most_waiting: int = 2_000
    requests_a_minute: int | None = None
    read_seconds: float = 10.0
    watch_seconds: float = 5.0


class Refused(InputError):  # noqa: N818  an answer
    """A request that is not answered, with HTTP's status; the message is for the client.

    Args:
        status: of the response.
        line: what is wrong and what to do.
        retry_seconds: after which the same request may do; None: it never will.
    """

    def __init__(self, status: int, line: str, retry_seconds: int | None = None) -> None:
        self.status, self.retry_seconds = status, retry_seconds
        super().__init__(line)


def bug(error: Exception) -> str:
    """Returns the answer after a bug of this program; the traceback goes to standard error."""
    return f"this is a bug in econmt: {type(error).__name__}"
