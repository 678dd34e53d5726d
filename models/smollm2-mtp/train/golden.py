"""Golden drafts: what the head proposes along fixed greedy continuations.

The stored ids are teacher-forced when drafts are compared, because the target's greedy margins are
tight (the closest call between the first two tokens is 0.00009): other arithmetic may decide
differently there, and then everything after it would differ for no fault of the head's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from head import Head, Session, load_snapshot
from target import Cache, Target
from tokens import EOS, Chat

DEPTH = 3
NOTE = (
    "Row p of the head takes (token p+1, hidden p) at rope position p; the prefill makes one row "
    "for every prompt token, the last of them with the bonus. rewrite: rows of accepted drafts are "
    "recomputed from true target hiddens; keep: they keep the chained hidden they were drafted "
    "with. All in f32."
)
MODES = ("rewrite", "keep")


def greedy(target: Target, prompt: list[int], limit: int) -> list[int]:
    """The target's greedy continuation of `prompt`, up to and with its end token."""
    cache = Cache(1, len(prompt) + limit, target.dtype)
    n = len(prompt)
    causal = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    hidden = target.forward(torch.tensor([prompt]), torch.arange(n)[None], causal, cache, 0)
    out: list[int] = []
    while True:
        out.append(int(target.logits(hidden[0, -1]).argmax()))
        if out[-1] == EOS or len(out) == limit:
            return out
        mask = torch.ones(1, 1, 1, n + 1, dtype=torch.bool)
        hidden = target.forward(torch.tensor([out[-1:]]), torch.tensor([[n]]), mask, cache, n)
        n += 1


def rounds(
    head: Head,
    embedding: Tensor,
    ids: list[int],
    prompt_len: int,
    hidden: Tensor,
    mode: str,
    vocabulary: Tensor | None = None,
) -> list[dict[str, Any]]:
    """Speculative rounds along `ids`, the first bonus at index `prompt_len`.

    hidden [n, HIDDEN] is the target's, for all of `ids` but the last. Without `vocabulary` drafts
    come from the full head. Rounds stop where fewer than DEPTH tokens are left to compare with.
    """
    output = embedding if vocabulary is None else embedding[vocabulary]

    def best(o: Tensor) -> int:
        index = int((output @ o).argmax())
        return index if vocabulary is None else int(vocabulary[index])

    session = Session(head, embedding)
    bonus = prompt_len
    o = session.append(ids[1 : bonus + 1], hidden[:bonus])[-1:]
    result = []
    while bonus + DEPTH < len(ids):
        drafts, chain = [best(o[0])], o
        while len(drafts) < DEPTH:
            chain = session.append(drafts[-1:], chain)
            drafts.append(best(chain[0]))
        accepted = 0
        while accepted < DEPTH and drafts[accepted] == ids[bonus + 1 + accepted]:
            accepted += 1
        result.append(dict(bonus_index=bonus, bonus=ids[bonus], drafts=drafts, accepted=accepted))
        # The last draft never became a row, so at most DEPTH - 1 chained rows can stay.
        start = bonus + (min(accepted, DEPTH - 1) if mode == "keep" else 0)
        bonus += accepted + 1
        if bonus >= len(ids):
            break
        session.trim(start)
        o = session.append(ids[start + 1 : bonus + 1], hidden[start:bonus])[-1:]
    return result


def write(
    folder: Path, target: Target, chat: Chat, prompts: list[dict[str, str]], limit: int
) -> None:
    """Write FOLDER/golden.json for the head that lies there."""
    head, vocabulary = load_snapshot(folder)
    entries = []
    for prompt in prompts:
        start = chat.prompt(prompt["prompt"])
        continuation = greedy(target, start, limit)
        ids = start + continuation
        hidden = target.read(ids[:-1])
        top = target.logits(hidden[len(start) - 1 :]).topk(2, -1).values
        entry: dict[str, Any] = dict(prompt=prompt["prompt"], cls=prompt["cls"])
        entry.update(prompt_ids=start, greedy_ids=continuation, text=chat.text(continuation))
        entry["min_top1_top2_margin"] = float((top[:, 0] - top[:, 1]).min())
        for mode in MODES:
            for name, ids_of in (("full", None), ("reduced", vocabulary)):
                entry[f"rounds_{mode}_{name}"] = rounds(
                    head, target.embedding, ids, len(start), hidden, mode, ids_of
                )
        entries.append(entry)
    golden = dict(depth=DEPTH, note=NOTE, prompts=entries)
    (folder / "golden.json").write_text(json.dumps(golden, indent=1))


def check(folder: Path, target: Target) -> bool:
    """Recompute every stored round of FOLDER/golden.json; print and return whether all agree."""
    head, vocabulary = load_snapshot(folder)
    golden = json.loads((folder / "golden.json").read_text())
    total: dict[str, list[int]] = {}
    for entry in golden["prompts"]:
        start = entry["prompt_ids"]
        ids = start + entry["greedy_ids"]
        hidden = target.read(ids[:-1])
        for mode in MODES:
            for name, ids_of in (("full", None), ("reduced", vocabulary)):
                key = f"rounds_{mode}_{name}"
                got = rounds(head, target.embedding, ids, len(start), hidden, mode, ids_of)
                same = sum(a == b for a, b in zip(got, entry[key]))
                sums = total.setdefault(key, [0, 0, 0])
                sums[0] += same
                sums[1] += max(len(got), len(entry[key]))
                sums[2] += sum(r["accepted"] for r in got)
    for key, (same, count, accepted) in total.items():
        print(
            f"{folder.name} golden {key}: {same}/{count} rounds agree, "
            f"{1 + accepted / count:.2f} tokens per pass",
            flush=True,
        )
    return all(same == count for same, count, _ in total.values())
