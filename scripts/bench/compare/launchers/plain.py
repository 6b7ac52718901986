"""The comparison's yardstick: the same model as a careful person writes it in plain PyTorch.

The model is :class:`scripts.bench.plain_model.PlainModel` over packed sequences, its loss on the positions that are not
padding; fused Adam; batches of sentences of like length. Usage:

python plain.py [--precision PRECISION] train DATA MODEL_FOLDER UPDATES LOG_EVERY
python plain.py [--precision PRECISION] translate DATA MODEL_FOLDER OUTPUT

PRECISION is float32 or bfloat16, which is one line of ``torch.autocast``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))


from scripts.bench.plain_model import PAD, Memory, PlainModel, Sizes

BOS, EOS = 2, 3
BATCH, BEAM = 64, 5
POOL = 100
"""Batches that are sorted by length together."""


class Text(NamedTuple):
    """The token files as ids; targets have ``<s>`` and ``</s>``, sources have ``</s>``."""

    pairs: list[tuple[list[int], list[int]]]
    sizes: tuple[int, int]
    words: list[str]


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def read_text(data: Path, split: str) -> Text:
    special = ["<pad>", "<unk>", "<s>", "</s>"]
    vocabularies = [[*special, *read_lines(data / f"vocabulary.{side}.joeynmt.txt")] for side in ("en", "de")]
    ids = [{word: number for number, word in enumerate(words)} for words in vocabularies]
    sources = [[ids[0][word] for word in line.split()] for line in read_lines(data / f"{split}.en")]
    targets = [[ids[1][word] for word in line.split()] for line in read_lines(data / f"{split}.de")]
    pairs = [([*left, EOS], [BOS, *right, EOS]) for left, right in zip(sources, targets, strict=True)]
    return Text(pairs, (len(ids[0]), len(ids[1])), vocabularies[1])


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def batches(text: Text, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields source ids, source lengths and target ids for ever; sentences of similar length share a batch."""
    draw = random.Random(seed)
    while True:
        order = list(range(len(text.pairs)))
        draw.shuffle(order)
        groups = []
        for first in range(0, len(order), POOL * BATCH):
            pool = sorted(
                order[first : first + POOL * BATCH],
                key=lambda number: (len(text.pairs[number][1]), len(text.pairs[number][0])),
            )
            groups += [pool[place : place + BATCH] for place in range(0, len(pool), BATCH)]
        draw.shuffle(groups)
        for group in groups:
            sources, targets = zip(*(text.pairs[number] for number in group), strict=True)
            yield padded(sources), torch.tensor([len(row) for row in sources]), padded(targets)


def training(data: Path) -> tuple[PlainModel, Iterator[tuple[int, Tensor]]]:
    """Returns a model, and an iterator that trains it: target tokens and loss of each update, for ever."""
    torch.manual_seed(1)
    text = read_text(data, "train")
    model = PlainModel(Sizes(*text.sizes), packed=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def updates() -> Iterator[tuple[int, Tensor]]:
        for source, lengths, target in batches(text, seed=1):
            optimizer.zero_grad()
            loss = model.loss(source, lengths, target)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            yield int((target[:, 1:] != PAD).sum()), loss.detach()

    return model, updates()


def train(data: Path, folder: Path, updates: int, log_every: int) -> None:
    tokens, (model, trained) = 0, training(data)
    for update, (count, loss) in enumerate(islice(trained, updates), 1):
        tokens += count
        if update % log_every == 0:
            print(f"update {update}: {tokens} target tokens, loss {loss.item():.3f}", flush=True)
            tokens = 0
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")


@torch.inference_mode()
def search(model: PlainModel, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the best of ``BEAM`` hypotheses of each sentence, scores divided by length."""
    count = len(sources)
    memory, state = model.encode(padded(sources), torch.tensor([len(row) for row in sources]))
    numbers = torch.arange(count)
    spread = numbers.repeat_interleave(BEAM)
    memory, state = Memory(*(part[spread] for part in memory)), tuple(part[spread] for part in state)
    words = torch.full((count * BEAM, 1), BOS)
    scores = torch.full((count, BEAM), float("-inf"))
    scores[:, 0] = 0.0
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(count)]
    limits = [2 * len(row) + 10 for row in sources]
    for length in range(1, max(limits) + 1):
        state = model.step(model.inputs(model.target(words[:, -1])), memory, state)
        log_probabilities = torch.log_softmax(model.logits(state[-1]), 1).view(count, BEAM, -1)
        vocabulary = log_probabilities.shape[2]
        best, places = (scores.unsqueeze(2) + log_probabilities).view(count, -1).topk(2 * BEAM, 1)
        parents, chosen = places // vocabulary, places % vocabulary
        ends = chosen == EOS
        for row, column in ends[:, :BEAM].nonzero().tolist():
            if len(finished[row]) < BEAM and length <= limits[row]:
                parent = row * BEAM + int(parents[row, column])
                finished[row].append((float(best[row, column]) / length, words[parent, 1:].tolist()))
        if all(len(found) >= BEAM or length >= limit for found, limit in zip(finished, limits, strict=True)):
            break
        scores, kept = best.masked_fill(ends, float("-inf")).topk(BEAM, 1)
        rows = (parents.gather(1, kept) + BEAM * numbers.unsqueeze(1)).view(-1)
        words = torch.cat((words[rows], chosen.gather(1, kept).view(-1, 1)), 1)
        state = tuple(part[rows] for part in state)
    rest = words.view(count, BEAM, -1)[:, 0, 1:].tolist()
    return [max(found)[1] if found else rest[row][: limits[row]] for row, found in enumerate(finished)]


def translate(data: Path, folder: Path, output: Path) -> None:
    text = read_text(data, "test")
    model = PlainModel(Sizes(*text.sizes), packed=True).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    began = time.perf_counter()
    order = sorted(range(len(text.pairs)), key=lambda number: len(text.pairs[number][0]))
    lines = [""] * len(order)
    for first in range(0, len(order), BATCH):
        group = order[first : first + BATCH]
        for number, ids in zip(group, search(model, [text.pairs[n][0] for n in group]), strict=True):
            lines[number] = " ".join(text.words[i] for i in ids)
    output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"translated in {time.perf_counter() - began:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("verb", choices=("train", "translate"))
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rest", nargs="+")
    given = parser.parse_args()
    with torch.autocast("cpu", torch.bfloat16, enabled=given.precision == "bfloat16"):
        if given.verb == "train":
            train(given.data, given.folder, *map(int, given.rest))
        else:
            translate(given.data, given.folder, Path(given.rest[0]))


if __name__ == "__main__":
    main()
