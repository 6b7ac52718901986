"""The comparison's yardstick: the same model as a careful person writes it in plain PyTorch.

Encoder ``nn.LSTM`` over packed sequences; decoder a loop of LSTM cells with all four gates in one product, the input's
part of it and the attention's keys computed for all positions before the loop; output layer and loss once, on the
positions that are not padding; fused Adam; batches of sentences of like length. Autograd does the rest. Usage:

python plain.py train DATA MODEL_FOLDER UPDATES LOG_EVERY
python plain.py translate DATA MODEL_FOLDER OUTPUT
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

PAD, BOS, EOS = 0, 2, 3
BATCH, SIZE, BEAM = 64, 512, 5
POOL = 100
"""Batches that are sorted by length together."""


class Memory(NamedTuple):
    """The source as attention sees it: keys (B, S, A), values (B, S, E), padding (B, S) bool."""

    keys: Tensor
    values: Tensor
    padding: Tensor


class Model(nn.Module):
    """Bidirectional LSTM 2 x 256, LSTM 512 with additive attention and input feeding, embeddings 512."""

    def __init__(self, source_size: int, target_size: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source_size, SIZE, padding_idx=PAD)
        self.target = nn.Embedding(target_size, SIZE, padding_idx=PAD)
        self.encoder = nn.LSTM(SIZE, SIZE // 2, batch_first=True, bidirectional=True)
        self.start = nn.Linear(SIZE, 2 * SIZE)
        self.inputs = nn.Linear(SIZE, 4 * SIZE)
        self.recurrent = nn.Linear(2 * SIZE, 4 * SIZE, bias=False)
        self.keys = nn.Linear(SIZE, SIZE, bias=False)
        self.query = nn.Linear(SIZE, SIZE, bias=False)
        self.score = nn.Linear(SIZE, 1, bias=False)
        self.combine = nn.Linear(2 * SIZE, SIZE)
        self.output = nn.Linear(SIZE, target_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.08, 0.08)

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Memory, tuple[Tensor, Tensor, Tensor]]:
        """Source ids (B, S) and lengths (B,); returns what attention sees and the first (h, c, o), each (B, H)."""
        packed = pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        states, (last, _) = self.encoder(packed)
        values, _ = pad_packed_sequence(states, batch_first=True)
        hidden, cell = torch.tanh(self.start(torch.cat((last[0], last[1]), 1))).chunk(2, 1)
        return Memory(self.keys(values), values, source == PAD), (hidden, cell, torch.zeros_like(hidden))

    def step(
        self, inputs: Tensor, memory: Memory, state: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One position; ``inputs`` (B, 4H) is the input's part of the gates. Returns the next (h, c, o)."""
        hidden, cell, fed = state
        gates = inputs + self.recurrent(torch.cat((hidden, fed), 1))
        enter, forget, new, leave = gates.chunk(4, 1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
        hidden = torch.sigmoid(leave) * torch.tanh(cell)
        scores = self.score(torch.tanh(self.query(hidden).unsqueeze(1) + memory.keys)).squeeze(2)
        weights = torch.softmax(scores.masked_fill(memory.padding, float("-inf")), 1)
        context = torch.bmm(weights.unsqueeze(1), memory.values).squeeze(1)
        return hidden, cell, torch.tanh(self.combine(torch.cat((hidden, context), 1)))

    def loss(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy of target ids (B, T + 1) that begin with ``<s>``."""
        memory, state = self.encode(source, lengths)
        outputs = []
        for inputs in self.inputs(self.target(target[:, :-1])).unbind(1):
            state = self.step(inputs, memory, state)
            outputs.append(state[2])
        real = target[:, 1:] != PAD
        return F.cross_entropy(self.output(torch.stack(outputs, 1)[real]), target[:, 1:][real])


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
    """Source ids, source lengths and target ids, epoch after epoch; sentences of like length share a batch."""
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


def train(data: Path, folder: Path, updates: int, log_every: int) -> None:
    torch.manual_seed(1)
    text = read_text(data, "train")
    model = Model(*text.sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    tokens = 0
    for update, (source, lengths, target) in enumerate(batches(text, seed=1), 1):
        optimizer.zero_grad()
        loss = model.loss(source, lengths, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += int((target[:, 1:] != PAD).sum())
        if update % log_every == 0:
            print(f"update {update}: {tokens} target tokens, loss {loss.item():.3f}", flush=True)
            tokens = 0
        if update == updates:
            break
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")


@torch.inference_mode()
def search(model: Model, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """The best of ``BEAM`` hypotheses of each sentence, scores divided by length."""
    count = len(sources)
    memory, state = model.encode(padded(sources), torch.tensor([len(row) for row in sources]))
    spread = torch.arange(count).repeat_interleave(BEAM)
    memory, state = Memory(*(part[spread] for part in memory)), tuple(part[spread] for part in state)
    words = torch.full((count * BEAM, 1), BOS)
    scores = torch.full((count, BEAM), float("-inf"))
    scores[:, 0] = 0.0
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(count)]
    limits = [2 * len(row) + 10 for row in sources]
    for length in range(1, max(limits) + 1):
        state = model.step(model.inputs(model.target(words[:, -1])), memory, state)
        log_probabilities = torch.log_softmax(model.output(state[2]), 1).view(count, BEAM, -1)
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
        rows = (parents.gather(1, kept) + BEAM * torch.arange(count).unsqueeze(1)).view(-1)
        words = torch.cat((words[rows], chosen.gather(1, kept).view(-1, 1)), 1)
        state = tuple(part[rows] for part in state)
    rest = words.view(count, BEAM, -1)[:, 0, 1:].tolist()
    return [max(found)[1] if found else rest[row][: limits[row]] for row, found in enumerate(finished)]


def translate(data: Path, folder: Path, output: Path) -> None:
    text = read_text(data, "test")
    model = Model(*text.sizes).eval()
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


if __name__ == "__main__":
    words = sys.argv[1:]
    in_bfloat16 = words[0] == "--bfloat16"
    verb, data, folder, *rest = words[in_bfloat16:]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bfloat16):
        if verb == "train":
            train(Path(data), Path(folder), *map(int, rest))
        else:
            translate(Path(data), Path(folder), Path(rest[0]))
