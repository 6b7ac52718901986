"""Limits of the server, and the error that refuses a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from econmt.api import InputError

if TYPE_CHECKING:  # the processes that read files start fast
    from econmt.api.requests import Glossary


class Settings(NamedTuple):
    """Limits of a server.

    Attributes:
        beam_size: hypotheses kept by the search, a bound of the alternatives; None: the recipe's.
        batch_size: sentences translated together; None: the recipe's.
        wait_ms: milliseconds that a sentence waits for others to be translated with.
        max_characters: maximum number of characters of a request's text.
        max_waiting: maximum number of sentences that wait, of all clients.
        requests_per_minute: requests a minute of a client; None: no limit.
        read_seconds: seconds within which a request must arrive.
        watch_seconds: seconds between checks of the model folders for other parameters.
        split_sentences: True if lines are split into sentences, which are translated one by one.
        restore_case: True if sentences in capitals are translated in lower case.
        avoid: phrases that no translation may contain.
        glossary: terms, with their translations, of every request.
        glossary_mode: see :class:`econmt.decoding.search.options.SearchOptions`.
        max_file_characters: maximum number of characters of a file's text.
    """

    beam_size: int | None = None
    batch_size: int | None = None
    wait_ms: float = 3.0
    max_characters: int = 10_000
    max_waiting: int = 2_000
    requests_per_minute: int | None = None
    read_seconds: float = 10.0
    watch_seconds: float = 5.0
    split_sentences: bool = True
    restore_case: bool = False
    avoid: tuple[str, ...] = ()
    glossary: Glossary | None = None
    glossary_mode: Literal["auto", "annotate", "constrain"] = "auto"
    max_file_characters: int = 200_000


class Refused(InputError):  # noqa: N818  an answer
    """Refusal of a request; the message is for the client.

    Args:
        status: HTTP status of the response.
        line: message with the reason and a remedy.
        retry_seconds: seconds after which the same request may succeed; None: it never will.
        hint: remedy that has a field of its own, where the message is LibreTranslate's.
    """

    def __init__(self, status: int, line: str, retry_seconds: int | None = None, hint: str = "") -> None:
        self.status, self.retry_seconds, self.hint = status, retry_seconds, hint
        super().__init__(line)


class Stopping(Refused):
    """Refusal of a request because the server is stopping."""

    def __init__(self) -> None:
        super().__init__(503, "the server is stopping; ask again when it is back", 5)


def bug(error: Exception) -> str:
    """Returns the message for a client after a bug of this program."""
    return f"this is a bug in econmt: {type(error).__name__}"
