"""Writes text in many languages from documentation.

A source is KIND:LANGUAGE=PATH. PATH is a folder, or with @REVISION or @DATE a git directory. Kinds are

- markdown: documentation such as MicrosoftDocs/sql-docs.de-de (CC BY 4.0), without files that machines translated;
- help: LibreOffice's help, the folder help/LANGUAGE/text of Debian's package libreoffice-help-LANGUAGE (MPL 2.0);
- catalogue: gettext catalogues such as python/python-docs-es, which hold the English text, too.

    python -m scripts.bench make-docs docs-ten markdown:en=sql-docs@2017-10-01 markdown:de=sql-docs.de-de@2018-04-01 ...
    econmt train docs-ten

Texts belong together if they are in files of the same name and stand at the same place: below headings with the same
anchor, in sections with the same blocks; in help, in paragraphs with the same id; in catalogues, if they translate the
same message. Writes

- valid, test and train.LANGUAGE: line n says the same in every language. Those of valid and test have all languages and
  are from files of their own. In train a line is empty in a language that lacks the text. No text of valid or test, in
  any language, is in train;
- to-LANGUAGE.src and .trg: each pair of texts of train once, in one of both directions;
- valid-all and test-all, .src and .trg: all directions of valid and test, with the tag of the target language before
  each source. Line n of .directions names the direction.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple

from econmt.errors import InputError
from scripts.bench.docs_formats import (
    Texts,
    front_matter,
    messages,
    plain_message,
    text_of_help,
    text_of_markdown,
)
from scripts.bench.frame import Bench
from scripts.bench.splits import WORDS_HELD_OUT, Row, Splits, digest, is_similar, shuffled

HELD_OUT_ROWS = 1000
"""Rows of the validation and of the test text."""
ROWS_OF_FILE = 20
"""Rows at most that a file gives to the validation or test text."""
VALID_ROWS = 20
"""Rows of each direction in valid-all."""
MAX_WORDS = 100
"""Words at most of a text; two characters of Chinese, Japanese or Korean count as one word."""

_SCRIPTS = {
    "ja": re.compile("[\u3040-\u30ff\u4e00-\u9fff]"),
    "ko": re.compile("[\uac00-\ud7af]"),
    "ru": re.compile("[\u0400-\u04ff]"),
    "zh": re.compile("[\u4e00-\u9fff]"),
}
"""A character of these languages; texts of other languages have none of them."""
_WIDE = re.compile("[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")


class Folder:
    """Files below a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        """Returns the names of all files, relative to the folder."""
        return [path.relative_to(self._path).as_posix() for path in self._path.rglob("*") if path.is_file()]

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if there is none of this name."""
        path = self._path / name
        return path.read_bytes() if path.is_file() else None

    def close(self) -> None:
        """Does nothing."""


class Commit:
    """Files of a commit of a git directory, which a process of git reads.

    Args:
        path: git directory.
        revision: a commit, branch or tag, or a date such as 2018-04-01 for the newest commit before that day.
    """

    def __init__(self, path: Path, revision: str) -> None:
        self._command = ["git", "-C", str(path)]
        find = ["rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
        if re.fullmatch(r"\d{4}-\d\d-\d\d", revision):
            find = ["rev-list", "-1", f"--before={revision}T00:00:00Z", "HEAD"]
        self._commit = self._git(*find).decode().strip()
        if not self._commit:
            raise InputError(f"{path}: no commit {revision}")
        self._process = subprocess.Popen(
            [*self._command, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def _git(self, *words: str) -> bytes:
        return subprocess.run([*self._command, *words], stdout=subprocess.PIPE, check=False).stdout

    def names(self) -> list[str]:
        """Returns the names of all files of the commit."""
        listed = self._git("ls-tree", "-r", "-z", "--name-only", self._commit)
        return listed.decode(errors="replace").split("\0")[:-1]

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if the commit has none of this name."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "the process was started with pipes"
        assert stdout is not None, "the process was started with pipes"
        stdin.write(f"{self._commit}:{name}\n".encode())
        stdin.flush()
        kind, size = stdout.readline().split()[-2:]
        if size == b"missing":
            return None
        content = stdout.read(int(size) + 1)[:-1]
        return content if kind == b"blob" else None

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


class Source(NamedTuple):
    """Documentation in one language, or catalogues that translate from English into it."""

    kind: str
    language: str
    tree: Folder | Commit


class Reader:
    """Reads the texts of a file from all sources of a kind.

    Args:
        sources: documentation of one kind, one source a language.
    """

    def __init__(self, kind: str, sources: Sequence[Source]) -> None:
        self.kind, self.sources = kind, sources
        self.counts: Counter[str] = Counter()
        self._include = functools.lru_cache(maxsize=20_000)(self._included)

    def names(self) -> list[str]:
        """Returns the names of files in two languages or more, and of all catalogues; counts the others."""
        suffix = {"markdown": ".md", "help": ".html", "catalogue": ".po"}[self.kind]
        files: Counter[str] = Counter()
        languages = {
            source.language: {n for n in source.tree.names() if n.endswith(suffix)} for source in self.sources
        }
        for found in languages.values():
            files.update(found)
        for language, found in languages.items():
            self.counts[f"{language}: files"] = len(found)
            if missing := len(files) - len(found):
                self.counts[f"{language}: files not found that another language has"] = missing
        return [name for name, count in files.items() if count > 1 or self.kind == "catalogue"]

    def texts(self, name: str) -> dict[str, Texts]:
        """Returns the texts of a file by language."""
        texts: dict[str, Texts] = {}
        for source in self.sources:
            content = source.tree.read(name)
            if content is None:
                continue
            if self.kind == "catalogue":
                for message, translation in messages(content):
                    texts.setdefault("en", {})[message,] = plain_message(message)
                    texts.setdefault(source.language, {})[message,] = plain_message(translation)
                continue
            include = functools.partial(self._include, source, name)
            found = text_of_help(content) if self.kind == "help" else text_of_markdown(content, include)
            if found is None:
                self.counts[f"{source.language}: files translated by machines, left out"] += 1
            else:
                texts[source.language] = found
        return texts

    def _included(self, source: Source, name: str, target: str) -> str | None:
        """Returns the words that a file includes from another one; None if it is missing or has several lines."""
        parts = list[str]()
        for part in (*name.split("/")[:-1], *target.strip().split("/")):
            if part == "..":
                del parts[-1:]
            elif part not in ("", ".", "~"):
                parts.append(part)
        content = source.tree.read("/".join(parts)) or b""
        lines = front_matter(content.decode("utf-8-sig", errors="replace"))[1]
        words = [line.strip() for line in lines if line.strip()]
        return words[0] if len(words) == 1 else None


def rows_of(texts: Mapping[str, Texts], languages: Sequence[str], left_out: Counter[str]) -> Iterator[Row]:
    """Yields texts that say the same, of two languages or more."""
    for place in dict.fromkeys(itertools.chain.from_iterable(texts.values())):
        row = dict.fromkeys(languages, "")
        for language, of_language in texts.items():
            text = unicodedata.normalize("NFC", " ".join(of_language.get(place, "").split()))
            if reason := why_not(text, language):
                left_out[reason] += place in of_language
            else:
                row[language] = text
        times = Counter(row.values())
        for language, text in row.items():
            # Names may be the same, but a longer text has not been translated.
            if language != languages[0] and times[text] > 1 and len(text.split()) >= WORDS_HELD_OUT:
                row[language] = ""
                left_out["texts that are the same in two languages"] += 1
        if sum(map(bool, row.values())) > 1:
            yield tuple(row.values())


def why_not(text: str, language: str) -> str:
    """Returns why a text is not used; an empty text if it is."""
    if not any(map(str.isalpha, text)):
        return "texts without letters"
    if len(text.split()) + len(_WIDE.findall(text)) / 2 > MAX_WORDS:
        return f"texts of more than {MAX_WORDS} words"
    own = _SCRIPTS.get(language)
    is_wrong = own.search(text) is None if own else any(each.search(text) for each in _SCRIPTS.values())
    return "texts in another script than their language's" if is_wrong else ""


def is_similar_wide(pair: Row) -> bool:
    """Returns True for texts of similar lengths; a character of Chinese, Japanese or Korean counts as two."""
    return is_similar(tuple(_WIDE.sub("--", side) for side in pair))


def write_pairs(folder: Path, languages: Sequence[str], left_out: Counter[str]) -> Iterator[tuple[str, int]]:
    """Writes to-LANGUAGE.src and .trg, and yields two languages and the number of their pairs.

    The digest of a pair says into which of both languages it is translated. Memory holds the digests of the pairs of
    two languages.
    """
    with ExitStack() as stack:

        def written(name: str) -> IO[str]:
            return stack.enter_context((folder / name).open("w", encoding="utf-8", newline="\n"))

        files = {each: (written(f"to-{each}.src"), written(f"to-{each}.trg")) for each in languages}
        for both in itertools.combinations(languages, 2):
            seen: set[int] = set()
            first, second = (
                (folder / f"train.{language}").open(encoding="utf-8", newline="\n") for language in both
            )
            with first, second:
                for pair in zip(first, second, strict=True):
                    if "\n" in pair:
                        continue
                    key = digest("".join(pair))
                    if pair[0] == pair[1] or not is_similar_wide(pair):
                        left_out["pairs that are alike or of unlike lengths"] += 1
                    elif key in seen:
                        left_out["pairs that occurred before"] += 1
                    else:
                        seen.add(key)
                        source = key % 2
                        src, trg = files[both[1 - source]]
                        src.write(pair[source])
                        trg.write(pair[1 - source])
            yield "-".join(both), len(seen)


def write_directions(folder: Path, split: str, languages: Sequence[str], most: int) -> int:
    """Writes ``most`` rows at most of a split in all directions, with tags; returns the number of lines."""
    sides = [(folder / f"{split}.{each}").read_text(encoding="utf-8").splitlines() for each in languages]
    texts = dict(zip(languages, sides, strict=True))
    count = 0
    with ExitStack() as stack:
        src, trg, directions = (
            stack.enter_context((folder / f"{split}-all.{each}").open("w", encoding="utf-8", newline="\n"))
            for each in ("src", "trg", "directions")
        )
        for source, target in itertools.permutations(languages, 2):
            rows = list(zip(texts[source], texts[target], strict=True))
            for text, translation in rows[:: max(1, len(rows) // most)][:most]:
                src.write(f"<2{target}> {text}\n")
                trg.write(f"{translation}\n")
                directions.write(f"{source}-{target}\n")
                count += 1
    return count


def make(folder: Path, sources: Sequence[Source], size: int = HELD_OUT_ROWS) -> Iterator[str]:
    """Writes the text, and yields the lines to print.

    Args:
        folder: folder to write. sources: documentation.
        size: number of rows of the validation and of the test text.
    """
    languages = ["en", *sorted({source.language for source in sources} - {"en"})]
    readers = {
        kind: Reader(kind, [source for source in sources if source.kind == kind])
        for kind in dict.fromkeys(source.kind for source in sources)
    }
    names = shuffled(f"{kind}:{name}" for kind, reader in readers.items() for name in reader.names())
    left_out: Counter[str] = Counter()
    with Splits(folder, languages, size, most=ROWS_OF_FILE) as splits:
        for kind, _, name in (each.partition(":") for each in names):
            splits.add(rows_of(readers[kind].texts(name), languages, left_out))
    for kind, reader in readers.items():
        yield from (f"{kind} of {what}: {count:,}" for what, count in sorted(reader.counts.items()))
    if not splits.counts["train"]:
        raise InputError(f"{len(names):,} files give no training text beside validation and test text")
    yield from (f"{folder / split}: {count:,} rows" for split, count in splits.counts.items())
    for split, most in (("valid", VALID_ROWS), ("test", size)):
        yield f"{folder / split}-all: {write_directions(folder, split, languages, most):,} pairs"
    total = 0
    for both, count in write_pairs(folder, languages, left_out):
        total += count
        yield f"{both}: {count:,} pairs"
    yield f"{folder / 'to-*'}: {total:,} pairs"
    left_out.update({f"rows {reason}": count for reason, count in splits.left_out.items()})
    yield from (f"left out: {count:,} {reason}" for reason, count in left_out.items())


def source_of(text: str) -> Source:
    """Returns the source that an argument KIND:LANGUAGE=PATH[@REVISION] names."""
    match = re.fullmatch(r"(markdown|help|catalogue):([a-z]{2})=([^@]+)(?:@(.+))?", text)
    if match is None:
        raise InputError(
            f"{text}: write markdown:LANGUAGE=PATH, help:... or catalogue:..., with @REVISION for git"
        )
    path = Path(match[3])
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    return Source(match[1], match[2], Commit(path, match[4]) if match[4] else Folder(path))


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    add = bench.add_argument
    add("folder", type=Path, help="folder to write")
    add("sources", nargs="+", help="KIND:LANGUAGE=PATH, see above")
    add("--held-out", type=int, default=HELD_OUT_ROWS, help="rows of the validation and of the test text")
    given = bench.begin(words)
    sources = [source_of(each) for each in given.sources]
    for line in make(given.folder, sources, given.held_out):
        print(line, file=sys.stderr)
    for source in sources:
        source.tree.close()
