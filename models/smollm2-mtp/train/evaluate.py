#!/usr/bin/env python3
"""Measure heads: do they reproduce their golden drafts, and how many tokens does a pass yield?

A pass is one run of the target over the bonus token and the drafts; it yields the accepted drafts
and one more token. Everything is greedy and in f32, and the rows of accepted drafts are recomputed
from the target's own hiddens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from data import Sample, compose_requests, generate, load
from golden import check
from head import Head, load_snapshot
from prompts import compose
from target import VOCAB, Target, load_weights
from tokens import Chat

BUNDLED = [Path(__file__).resolve().parents[1] / name for name in ("bf16", "4bit")]
UNSEEN_LIMIT = 128  # tokens of an answer

# Element [k][i]: is draft k right in a round whose bonus is response token i?
Correct = Callable[[Sample], list[list[bool]]]


@dataclass
class Acceptance:
    """Counts over rounds of drafting."""

    depth: int
    sequences: int = 0
    rounds: int = 0
    accepted: list[int] = field(default_factory=list)  # rounds that accepted draft k

    def __post_init__(self) -> None:
        self.accepted = [0] * self.depth

    def tokens_per_pass(self) -> float:
        return 1 + sum(self.accepted) / max(1, self.rounds)

    def conditional(self) -> list[float]:
        """For each position, the chance of a draft whose predecessors were all accepted."""
        reached = [self.rounds, *self.accepted[:-1]]
        return [a / max(1, r) for a, r in zip(self.accepted, reached)]


@torch.no_grad()
def correct(
    head: Head, vocabulary: Tensor, target: Target, depth: int, sample: Sample
) -> list[list[bool]]:
    """A `Correct` once everything but the sample is given."""
    ids, start = sample["ids"], sample["start"]
    outputs = head.chained(
        target.embedding[ids[1:-1]][None], sample["hidden"][None, :-1].float(), start - 1, depth
    )
    rows = target.embedding[vocabulary]
    return [
        (vocabulary[(o[0] @ rows.T).argmax(-1)] == ids[start + 1 + k :]).tolist()
        for k, o in enumerate(outputs)
    ]


def measure(correct: Correct, samples: list[Sample], depth: int) -> dict[str, Acceptance]:
    """Draft along each greedy sample as an engine would; the result is by split and class."""
    result: dict[str, Acceptance] = {}
    for sample in samples:
        right = correct(sample)
        split, cls = sample["split"], sample["cls"]
        groups = [split] if cls == split else [split, f"{split} {cls}"]
        sums = [result.setdefault(name, Acceptance(depth)) for name in groups]
        bonus, said = 0, len(sample["ids"]) - sample["start"]
        rounds: list[int] = []
        # A round needs `depth` known tokens after its bonus to be compared with.
        while bonus + depth < said:
            accepted = next((k for k in range(depth) if not right[k][bonus]), depth)
            rounds.append(accepted)
            bonus += accepted + 1
        for total in sums:
            total.sequences += 1
            total.rounds += len(rounds)
            for k in range(depth):
                total.accepted[k] += sum(a > k for a in rounds)
    return dict(sorted(result.items()))


def show(name: str, ids: int, correct: Correct, samples: list[Sample], depth: int) -> None:
    """Print what `measure` finds; `ids` is the size of the draft vocabulary."""
    greedy = [s for s in samples if s["temperature"] == 0]
    for group, a in measure(correct, greedy, depth).items():
        chances = " ".join(f"{c:.2f}" for c in a.conditional())
        print(
            f"{name} {group}: {ids} ids, {a.sequences} answers, {a.rounds} passes, "
            f"accepted by position {chances}, {a.tokens_per_pass():.2f} tokens per pass",
            flush=True,
        )


def report(
    name: str, head: Head, vocabulary: Tensor, target: Target, samples: list[Sample], depth: int
) -> None:
    """Show the acceptance with the reduced and the full vocabulary."""
    for ids in (vocabulary, torch.arange(VOCAB)):
        show(name, len(ids), partial(correct, head, ids, target, depth), samples, depth)


def answer_unseen(
    target: Target, limit: int = UNSEEN_LIMIT, layers: tuple[int, ...] = ()
) -> list[Sample]:
    """Greedy answers to the prompts that no grammar makes."""
    chat = Chat()
    return generate(target, compose_requests(chat, compose({}), (0.0,), 0), limit, 0, layers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Recompute the drafts in golden.json and count tokens per target pass. "
        "Exit status 1: some golden drafts differ."
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=BUNDLED,
        metavar="FOLDER",
        help="heads to measure (default: the bundled ones)",
    )
    parser.add_argument(
        "--unseen",
        action="store_true",
        help="let the target answer the hand-written prompts and draft along the answers",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="draft along the held-out answers of a training run, RUN/eval",
    )
    parser.add_argument("--depth", type=int, default=3, help="drafts per round (%(default)s)")
    arguments = parser.parse_args()
    target = Target(load_weights())
    samples = answer_unseen(target) if arguments.unseen else []
    if arguments.data:
        samples += load(arguments.data)
    agree = True
    for folder in arguments.folders:
        agree &= check(folder, target)
        head, vocabulary = load_snapshot(folder)
        report(folder.name, head, vocabulary, target, samples, arguments.depth)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
