"""Choice of the translations that are nearest to references, on several cores; imports no torch, for its processes."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from typing import NamedTuple

from sacrebleu.metrics.bleu import BLEU

_FEW = 16
"""Chunks that take less time than starting processes."""


class Candidates(NamedTuple):
    """Sentences of a chunk: sources, translations of each, best first, and references, if there are any."""

    sources: list[str]
    translations: list[list[str]]
    references: list[str] | None


def nearest(lists: Sequence[Sequence[str]], references: Sequence[str], tokenizer: str) -> list[int]:
    """Returns the index of the translation with the highest sentence BLEU in each list; the first of equal ones.

    Args:
        lists: translations of each sentence. references: reference of each.
        tokenizer: sacreBLEU's name of the tokenizer.
    """
    metric = BLEU(effective_order=True, tokenize=tokenizer)
    chosen = []
    for texts, reference in zip(lists, references, strict=True):
        scores = (
            [metric.sentence_score(text, [reference]).score for text in texts] if len(texts) > 1 else [0.0]
        )
        chosen.append(max(range(len(scores)), key=scores.__getitem__))
    return chosen


def choose(
    chunks: Iterable[Candidates], tokenizer: str, processes: int
) -> Iterator[tuple[Candidates, list[int]]]:
    """Yields each chunk with the index of the translation that is chosen for each sentence.

    That is the nearest to the reference, or the first if there are no references.

    Args:
        chunks: the sentences. tokenizer: see :func:`nearest`.
        processes: number of processes that compare; few chunks are compared in this one.
    """
    stream = iter(chunks)
    head = list(islice(stream, _FEW))
    if len(head) < _FEW or processes == 1 or head[0].references is None:
        for chunk in chain(head, stream):
            yield chunk, _chosen(chunk, tokenizer)
        return
    waiting: deque[tuple[Candidates, Future[list[int]]]] = deque()
    with ProcessPoolExecutor(processes, get_context("spawn"), _end_with_parent) as pool:
        for chunk in chain(head, stream):
            waiting.append((chunk, pool.submit(_chosen, chunk, tokenizer)))
            if len(waiting) > 2 * processes:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def _end_with_parent() -> None:
    """Makes a process end with the one that started it, even if that is killed."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _chosen(chunk: Candidates, tokenizer: str) -> list[int]:
    if chunk.references is None:
        return [0] * len(chunk.translations)
    return nearest(chunk.translations, chunk.references, tokenizer)
