"""Sampling the target: what it says is all that the head learns from.

Two kinds of conversations. For *composed* ones the user turn comes from `prompts.py`; for *own*
ones the target writes it as well, by going on from where a user's words would begin. Each chunk of
conversations becomes one file, and a chunk that has its file is not sampled again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from prompts import Prompt, quote
from target import HIDDEN, VOCAB, Cache, Target
from tokens import EOS, Chat

USER_TURN = 72  # tokens; longer user turns are dropped
USER_TEMPERATURES = (0.7, 0.8, 0.8, 0.9, 1.0)
SHORTEST = 6  # tokens; shorter user turns and answers are dropped too
PREFILL_ROWS = 16  # at a time, to bound the size of the attention masks


class Request(TypedDict):
    """A conversation to continue."""

    ids: list[int]
    temperature: float
    cls: str
    split: str


class Sample(TypedDict):
    """A conversation with the target's hidden states; learning starts at ids[start]."""

    ids: Tensor  # int64 [n]
    hidden: Tensor  # f16 [n-1, HIDDEN], after the final norm
    taps: NotRequired[Tensor]  # f16 [n-1, layers * HIDDEN], outputs of the layers asked for
    start: int
    temperature: float
    cls: str
    split: str


def generate(
    target: Target,
    requests: list[Request],
    limit: int,
    seed: int,
    layers: tuple[int, ...] = (),
) -> list[Sample]:
    """Continue all `requests` in one batch, by at most `limit` tokens each.

    Prompts are padded on the left, so that every row writes the same cache column. The outputs of
    `layers` are kept as the samples' taps.
    """
    rng = torch.Generator().manual_seed(seed)
    batch = len(requests)
    lengths = torch.tensor([len(r["ids"]) for r in requests])
    width = int(lengths.max())
    pad = width - lengths
    tokens = torch.full((batch, width), EOS)
    for row, request in enumerate(requests):
        tokens[row, pad[row] :] = torch.tensor(request["ids"])
    temperature = torch.tensor([r["temperature"] for r in requests])
    cache = Cache(batch, width + limit, target.dtype)
    hidden = torch.zeros(batch, width + limit, HIDDEN, dtype=torch.float16)
    kept = torch.zeros(batch, width + limit, len(layers) * HIDDEN, dtype=torch.float16)
    taps = dict.fromkeys(layers, torch.empty(0))
    last = torch.zeros(batch, HIDDEN)
    columns = torch.arange(width + limit)
    causal = columns[None, :width] <= columns[:width, None]
    for low in range(0, batch, PREFILL_ROWS):
        rows = slice(low, min(low + PREFILL_ROWS, batch))
        offset = pad[rows, None]
        visible = causal & (columns[:width] >= offset)[:, None]
        # A padding column sees itself: an empty softmax would be NaN.
        mask = (visible | torch.eye(width, dtype=torch.bool))[:, None]
        positions = (columns[:width] - offset).clamp(min=0)
        h = target.forward(tokens[rows], positions, mask, cache, 0, rows, taps)
        hidden[rows, :width], last[rows] = h.half(), h[:, -1]
        if layers:
            kept[rows, :width] = _joined(taps)

    said: list[list[int]] = [[] for _ in requests]
    alive, done = torch.arange(batch), torch.zeros(batch, dtype=torch.bool)
    for column in range(width, width + limit):
        choice = draw(target.logits(last), temperature[alive], rng)
        for row, token in enumerate(choice.tolist()):
            if not done[row]:
                said[alive[row]].append(token)
                done[row] = token == EOS
        if column + 1 == width + limit or done.all():
            break
        # Compacting the cache copies it, so wait until it pays.
        if done.sum() > max(8, len(done) // 6):
            rows = (~done).nonzero()[:, 0]
            alive, choice, done = alive[rows], choice[rows], done[rows]
            cache.keep(rows)
        mask = (columns[: column + 1] >= pad[alive, None])[:, None, None]
        positions = (column - pad[alive])[:, None]
        last = target.forward(choice[:, None], positions, mask, cache, column, taps=taps)[:, 0]
        hidden[alive, column] = last.half()
        if layers:
            kept[alive, column] = _joined(taps)[:, 0]

    samples = []
    for row, request in enumerate(requests):
        ids = torch.tensor(request["ids"] + said[row])
        first = int(pad[row])
        states = hidden[row, first : first + len(ids) - 1].clone()
        sample = Sample(
            ids=ids,
            hidden=states,
            start=len(request["ids"]),
            cls=request["cls"],
            temperature=request["temperature"],
            split=request["split"],
        )
        if layers:
            sample["taps"] = kept[row, first : first + len(ids) - 1].clone()
        samples.append(sample)
    return samples


def _joined(taps: dict[int, Tensor]) -> Tensor:
    """The taps side by side, in f16. A residual stream may hold more than f16 can: clamp."""
    most = torch.finfo(torch.float16).max
    return torch.cat(list(taps.values()), -1).clamp(-most, most).half()


def draw(logits: Tensor, temperature: Tensor, rng: torch.Generator) -> Tensor:
    """One token per row of logits [B, VOCAB]; temperature 0 takes the best."""
    choice = logits.argmax(-1)
    hot = temperature > 0
    if hot.any():
        # Of a sum over all tokens, the one in which a random share of it falls.
        sums = (logits[hot] / temperature[hot, None]).softmax(-1).cumsum_(-1)
        share = torch.rand(len(sums), 1, generator=rng) * sums[:, -1:]
        choice[hot] = torch.searchsorted(sums, share, right=True)[:, 0].clamp_(max=VOCAB - 1)
    return choice


def compose_requests(
    chat: Chat, prompts: list[Prompt], temperatures: tuple[float, ...], seed: int
) -> list[Request]:
    """A request per prompt, at one of the temperatures."""
    rng = random.Random(seed)
    return [
        Request(
            ids=chat.prompt(p["prompt"]),
            temperature=rng.choice(temperatures),
            cls=p["cls"],
            split=p["split"],
        )
        for p in prompts
    ]


def chunked(requests: list[Request], batch: int, seed: int) -> list[list[Request]]:
    """Batches of similar prompt lengths, which keeps the padding small."""
    requests = requests[:]
    random.Random(seed).shuffle(requests)
    chunks = []
    for low in range(0, len(requests), 4 * batch):
        window = sorted(requests[low : low + 4 * batch], key=lambda r: len(r["ids"]))
        chunks += [window[i : i + batch] for i in range(0, len(window), batch)]
    return chunks


def own_conversations(
    target: Target,
    chat: Chat,
    batch: int,
    limit: int,
    temperatures: tuple[float, ...],
    seed: int,
    layers: tuple[int, ...] = (),
    openings: Sequence[str] = ("",),
) -> list[Sample]:
    """Conversations of which the target wrote both turns; a twentieth is marked as held out.

    The user's words begin with one of the `openings`.
    """
    rng = random.Random(seed)
    opening = chat.before_user
    requests = [
        Request(
            ids=opening + chat.words(rng.choice(openings)),
            temperature=rng.choice(USER_TEMPERATURES),
            cls="own",
            split="train",
        )
        for _ in range(batch + batch // 4)  # some turns will be dropped
    ]
    answers: dict[str, Request] = {}
    for sample in generate(target, requests, USER_TURN, seed):
        turn = sample["ids"][len(opening) :].tolist()
        if turn[-1] != EOS or len(turn) < SHORTEST:
            continue
        # At low temperatures many turns begin alike; one of each kind is enough.
        beginning = chat.text(turn[:-1])[:40]
        held = len(answers) % 20 == 7
        request = Request(
            ids=opening + turn[:-1] + chat.after_user,
            cls="own",
            temperature=rng.choice(temperatures),
            split="own" if held else "train",
        )
        answers.setdefault(beginning, request)
    samples = generate(target, list(answers.values())[:batch], limit, seed + 1, layers)
    for sample in samples:
        # Its own user turns teach as well as its answers. Held-out ones measure answers only.
        if sample["split"] == "train":
            sample["start"] = len(opening)
    return samples


def quoting(
    target: Target,
    chat: Chat,
    sources: list[Sample],
    batch: int,
    limit: int,
    temperatures: tuple[float, ...],
    seed: int,
) -> list[Sample]:
    """Conversations in which the user quotes an answer of `sources` and wants it reworked."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for _ in range(50 * batch):  # many an answer has nothing to quote
        if len(prompts) == batch:
            break
        text = quote(chat.answer(rng.choice(sources)["ids"].tolist()), rng)
        if text is not None:
            prompts.append(Prompt(prompt=text, cls="quote", split="train"))
    if not prompts:
        return []
    requests = compose_requests(chat, prompts, temperatures, seed)
    return generate(target, requests, limit, seed + 1)


def sample_chunks(folder: Path, makers: list[Callable[[], list[Sample]]]) -> None:
    """Run each maker whose file is not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, make in enumerate(makers):
        path = folder / f"chunk{i:03d}.pt"
        if path.exists():
            continue
        begin = time.monotonic()
        samples = make()
        partial = path.with_suffix(".partial")
        torch.save(samples, partial)
        partial.replace(path)
        seconds = time.monotonic() - begin
        tokens = sum(len(s["ids"]) - s["start"] for s in samples)
        print(
            f"  {folder.name} {i + 1}/{len(makers)}: {len(samples)} conversations, {tokens} "
            f"tokens, {seconds:.0f} s, {tokens / seconds:.0f} tokens/s",
            flush=True,
        )


def load(folder: Path) -> Iterator[Sample]:
    """All samples of a folder that say more than a few tokens."""
    for path in sorted(folder.glob("chunk*.pt")):
        for sample in torch.load(path):
            if len(sample["ids"]) - sample["start"] >= SHORTEST:
                yield sample


def draft_vocabulary(samples: list[Sample], size: int) -> Tensor:
    """The `size` token ids worth drafting, ascending.

    What the target says counts four times what it reads; what it says at a high temperature
    does not count, for those tokens are luck.
    """
    counts = torch.zeros(VOCAB, dtype=torch.long)
    for sample in samples:
        start = sample["start"]
        counts += torch.bincount(sample["ids"][:start], minlength=VOCAB)
        if sample["temperature"] < 0.9:
            counts += 4 * torch.bincount(sample["ids"][start:], minlength=VOCAB)
    counts[:3] = counts.sum()  # the special tokens always belong
    return counts.argsort(descending=True, stable=True)[:size].sort().values
