#!/usr/bin/env python3
"""Measure drafters: do they reproduce their golden drafts, and how many tokens does a pass yield?

A pass is one run of the target over the bonus token and the drafts; it yields the accepted drafts
and one token more. Everything is greedy and in f32.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import shared  # noqa: F401  (makes the modules of the MTP recipe importable)
from data import Sample, load
from evaluate import answer_unseen, show
from target import VOCAB, Target, load_weights

from drafter import BLOCK, TAPS, Drafter, load_snapshot
from snapshot import check_golden

BUNDLED = Path(__file__).resolve().parents[1] / "4bit"


@torch.no_grad()
def correct(
    drafter: Drafter, vocabulary: Tensor, target: Target, depth: int, sample: Sample
) -> list[list[bool]]:
    """Element [k][i]: is draft k right in a round whose bonus is response token i?"""
    ids, start, taps = sample["ids"], sample["start"], sample["taps"].float()
    anchors = torch.arange(start, len(ids) - 1)
    states = drafter(target.embedding, taps, ids, anchors, depth + 1)
    drafts = vocabulary[(states @ target.embedding[vocabulary].T).argmax(-1)]
    return [
        (drafts[: len(anchors) - k, k] == ids[start + 1 + k :]).tolist() for k in range(depth)
    ]


def report(
    name: str,
    drafter: Drafter,
    vocabulary: Tensor,
    target: Target,
    samples: list[Sample],
    depth: int,
) -> None:
    """Show the acceptance with the reduced and the full vocabulary."""
    for ids in (vocabulary, torch.arange(VOCAB)):
        show(name, len(ids), partial(correct, drafter, ids, target, depth), samples, depth)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Recompute the drafts in golden.json and count tokens per target pass. "
        "Exit status 1: some golden drafts differ."
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[BUNDLED],
        metavar="FOLDER",
        help="drafters to measure (default: the bundled one)",
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
    parser.add_argument(
        "--depth",
        type=int,
        choices=range(1, BLOCK),
        default=3,
        help="drafts per round (%(default)s)",
    )
    arguments = parser.parse_args()
    for folder in arguments.folders:
        if not (folder / "model.safetensors").is_file():
            parser.error(f"{folder} holds no model.safetensors")
    target = Target(load_weights())
    samples = answer_unseen(target, layers=TAPS) if arguments.unseen else []
    if arguments.data:
        samples += load(arguments.data)
    agree = True
    for folder in arguments.folders:
        agree &= check_golden(folder, target)
        report(folder.name, *load_snapshot(folder), target, samples, arguments.depth)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
