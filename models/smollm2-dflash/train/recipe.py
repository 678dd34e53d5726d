#!/usr/bin/env python3
"""The whole recipe: sample the target, train a block drafter on it, export and measure it.

Everything lands in one folder, RUN: sampled conversations, a checkpoint, and the drafter 4bit/.
Finished work is not done again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import shared  # makes the modules of the MTP recipe importable
from data import (
    chunked,
    compose_requests,
    generate,
    load,
    own_conversations,
    sample_chunks,
)
from prompts import compose
from target import Target, load_weights
from tokens import Chat

from beginning import initial_drafter
from drafter import TAPS, load_snapshot
from measure import report
from snapshot import DEPTHS, export, write_golden
from teach import Course, train

RUN = Path(__file__).resolve().parent / "runs" / "full"
COMPOSED_TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 0.7)
OWN_TEMPERATURES = (0.0, 0.0, 0.7, 0.7, 0.9)


@dataclass(frozen=True)
class Budget:
    """How much of everything. Limits are tokens of an answer."""

    prompts: dict[str, int]
    batch: int
    limit: int
    own_chunks: int
    own_limit: int
    eval_limit: int
    golden_limit: int
    course: Course


FULL = Budget(
    prompts=dict(chat=330, code=135, copy=186),
    batch=104,
    limit=160,
    own_chunks=2,
    own_limit=160,
    eval_limit=128,
    golden_limit=48,
    course=Course(steps=500),
)
# Enough to walk every line of code; the drafter that comes out is of no use.
SMOKE = replace(
    FULL,
    prompts=dict(chat=12, code=6, copy=6),
    batch=12,
    limit=24,
    own_chunks=1,
    own_limit=24,
    eval_limit=12,
    golden_limit=12,
    course=Course(steps=3),
)


def sample_all(run: Path, budget: Budget, target: Target, seed: int) -> None:
    """Fill run/own, run/composed and run/eval."""
    chat = Chat()
    prompts = compose(budget.prompts, seed)
    training = [p for p in prompts if p["split"] == "train"]
    requests = compose_requests(chat, training, COMPOSED_TEMPERATURES, seed)
    chunks = chunked(requests, budget.batch, seed)
    sample_chunks(
        run / "composed",
        [partial(generate, target, c, budget.limit, seed + i, TAPS) for i, c in enumerate(chunks)],
    )
    own = partial(own_conversations, target, chat, budget.batch, budget.own_limit, OWN_TEMPERATURES)
    # Each call uses two seeds, and none may be one of those above.
    seeds = range(seed + 1000, seed + 1000 + 2 * budget.own_chunks, 2)
    sample_chunks(run / "own", [partial(own, s, TAPS) for s in seeds])
    held = [p for p in prompts if p["split"] != "train"]
    chunks = chunked(compose_requests(chat, held, (0.0,), seed), budget.batch, seed)
    sample_chunks(
        run / "eval", [partial(generate, target, c, budget.eval_limit, 0, TAPS) for c in chunks]
    )


def execute(run: Path, budget: Budget, seed: int) -> None:
    """Everything, from the first sampled token to the measured drafter."""
    weights = load_weights()
    target = Target(weights)
    print(f"Sampling conversations into {run}", flush=True)
    sample_all(run, budget, target, seed)
    samples = list(load(run / "composed"))
    samples += [s for s in load(run / "own") if s["split"] == "train"]
    # The MTP head's draft vocabulary: what the target says does not depend on the drafter.
    ids = json.loads((shared.MTP / "4bit" / "draft_vocab.json").read_text())["ids"]
    vocabulary = torch.tensor(ids)
    drafter = initial_drafter(weights, samples[:40])
    print(f"Training on {len(samples)} conversations", flush=True)
    train(budget.course, drafter, samples, target, vocabulary, run / "checkpoint.pt")

    folder = run / "4bit"
    export(folder, drafter, vocabulary)
    held = [p for p in compose(budget.prompts, seed) if p["split"] == "held"]
    shown = [next(p for p in held if p["cls"] == cls) for cls in budget.prompts]
    write_golden(folder, target, Chat(), shown, budget.golden_limit)
    # Measured as it will be loaded, not as it was trained.
    for depth in DEPTHS:
        report("4bit", *load_snapshot(folder), target, list(load(run / "eval")), depth)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train the block drafter from scratch. An interrupted run goes on when it is "
        "started again with the same arguments."
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="walk through everything in a minute or two; the drafter that comes out is of no use, "
        "and is deleted unless --run says where to keep it",
    )
    parser.add_argument(
        "--run", type=Path, help="folder for all results (default: runs/full beside this file)"
    )
    parser.add_argument("--threads", type=int, help="torch threads (default: one per core)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and sampling (%(default)s)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        if arguments.threads < 1:
            parser.error("--threads wants a number from 1 up")
        torch.set_num_threads(arguments.threads)
    budget = SMOKE if arguments.smoke else FULL
    if arguments.smoke and arguments.run is None:
        # A folder that is new every time: what is done already would not be done again.
        with tempfile.TemporaryDirectory(prefix="smollm2-dflash-") as folder:
            execute(Path(folder), budget, arguments.seed)
    else:
        run = arguments.run or RUN
        execute(run, budget, arguments.seed)
        print(f"The drafter is in {run / '4bit'}.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nrecipe.py: interrupted.", file=sys.stderr)
        sys.exit(130)
