#!/usr/bin/env python3
"""The whole recipe: sample the target, compute a starting head, train it, export and measure it.

Everything lands in one folder, RUN: sampled conversations, checkpoints, and the heads bf16/ and
4bit/. Finished work is not done again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import golden
from data import (
    Sample,
    chunked,
    compose_requests,
    draft_vocabulary,
    generate,
    load,
    own_conversations,
    quoting,
    sample_chunks,
)
from evaluate import report
from export import export
from head import Head, load_snapshot
from initial import initial_head
from prompts import OPENINGS, compose
from target import Target, Weights, load_weights
from tokens import Chat
from train import PHASES, Phase, run_phase

RUN = Path(__file__).resolve().parent / "runs" / "full"
COMPOSED_TEMPERATURES = (0.0, 0.0, 0.7, 0.7, 1.0)
OWN_TEMPERATURES = (0.0, 0.0, 0.7, 0.7, 0.9)
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Budget:
    """How much of everything. Limits are tokens of an answer."""

    prompts: dict[str, int]
    batch: int
    limit: int
    own_chunks: int
    own_limit: int
    quoting_chunks: int
    eval_batch: int
    eval_limit: int
    initial: int  # conversations that the starting head is fitted to
    vocabulary: int
    golden_limit: int
    phases: tuple[Phase, ...]


FULL = Budget(
    prompts=dict(chat=600, code=600, copy=600),
    batch=160,
    limit=256,
    own_chunks=20,
    own_limit=224,
    quoting_chunks=8,
    eval_batch=100,
    eval_limit=128,
    initial=60,
    vocabulary=6144,
    golden_limit=64,
    phases=PHASES,
)
# Enough to walk every line of code; the head that comes out is of no use.
SMOKE = replace(
    FULL,
    prompts=dict(chat=12, code=6, copy=6),
    batch=12,
    limit=24,
    own_chunks=1,
    own_limit=96,
    quoting_chunks=1,
    eval_batch=30,
    eval_limit=12,
    initial=6,
    golden_limit=12,
    phases=tuple(replace(phase, steps=2) for phase in PHASES),
)


def sample_all(
    run: Path, budget: Budget, started: bool, fast: Target, exact: Target, seed: int
) -> None:
    """Fill run/own, run/quoting, run/composed and run/eval.

    A head that was `started` elsewhere has learned from composed conversations already.

    Training data may be sampled in `fast` arithmetic. What is measured comes from `exact`, because
    a held-out answer must be what the target really says.
    """
    chat = Chat()
    own = partial(
        own_conversations,
        fast,
        chat,
        budget.batch,
        budget.own_limit,
        OWN_TEMPERATURES,
        openings=OPENINGS,
    )
    # Each call uses two seeds, and no two calls may share one.
    seeds = range(seed + 1000, seed + 1000 + 2 * budget.own_chunks, 2)
    sample_chunks(run / "own", [partial(own, s) for s in seeds])
    sources = [s for s in load(run / "own") if s["split"] == "train"]
    quotes = partial(
        quoting, fast, chat, sources, budget.batch, budget.limit, COMPOSED_TEMPERATURES
    )
    seeds = range(seed + 2000, seed + 2000 + 2 * budget.quoting_chunks, 2)
    sample_chunks(run / "quoting", [partial(quotes, s) for s in seeds])
    prompts = compose(budget.prompts, seed)
    training = [p for p in prompts if p["split"] == "train" and not started]
    requests = compose_requests(chat, training, COMPOSED_TEMPERATURES, seed)
    chunks = chunked(requests, budget.batch, seed)
    sample_chunks(
        run / "composed",
        [partial(generate, fast, c, budget.limit, seed + i) for i, c in enumerate(chunks)],
    )
    held = [p for p in prompts if p["split"] != "train"]
    chunks = chunked(compose_requests(chat, held, (0.0,), seed), budget.eval_batch, seed)
    sample_chunks(run / "eval", [partial(generate, exact, c, budget.eval_limit, 0) for c in chunks])


def training_samples(phase: Phase, composed: list[Sample], own: list[Sample]) -> list[Sample]:
    """The conversations that a phase learns from."""
    rng = random.Random(phase.seed)
    part = [s for s in composed if rng.random() < phase.composed]
    return [s for s in part + (own if phase.own else []) if s["temperature"] <= phase.hottest]


def train(
    run: Path,
    budget: Budget,
    start: Path | None,
    weights: Weights,
    target: Target,
    dtype: torch.dtype,
) -> tuple[Head, torch.Tensor]:
    """Train on what was sampled; returns the head and its draft vocabulary.

    From the exported head `start` only the last phase is left.
    """
    composed = list(load(run / "composed"))
    own = [s for s in load(run / "own") if s["split"] == "train"]
    own += load(run / "quoting")
    if start:
        head, vocabulary = load_snapshot(start)
        head.requires_grad_(True)
        phases = budget.phases[-1:]
    else:
        vocabulary = draft_vocabulary(composed + own, budget.vocabulary)
        head = initial_head(weights, target, composed[: budget.initial])
        phases = budget.phases
    for phase in phases:
        samples = training_samples(phase, composed, own)
        print(f"Phase {phase.name}: {len(samples)} conversations, {phase.steps} steps", flush=True)
        run_phase(phase, head, samples, target, vocabulary, run / f"{phase.name}.pt", dtype)
    return head, vocabulary


def execute(
    run: Path, budget: Budget, start: Path | None, dtype: torch.dtype, seed: int
) -> None:
    """Everything, from the first sampled token to the measured heads."""
    weights = load_weights()
    exact = Target(weights)
    fast = exact if dtype == torch.float32 else Target(weights, dtype)
    print(f"Sampling conversations into {run}", flush=True)
    sample_all(run, budget, start is not None, fast, exact, seed)
    head, vocabulary = train(run, budget, start, weights, fast, dtype)

    chat = Chat()
    held = [p for p in compose(budget.prompts, seed) if p["split"] == "held"]
    shown = [next(p for p in held if p["cls"] == cls) for cls in budget.prompts]
    samples = list(load(run / "eval"))
    samples += [s for s in load(run / "own") if s["split"] == "own"]
    steps = len(budget.phases[-1].chain)
    for name in ("bf16", "4bit"):
        folder = run / name
        export(folder, head, vocabulary, steps, quantized=name == "4bit")
        golden.write(folder, exact, chat, shown, budget.golden_limit)
        # Measured as it will be loaded, not as it was trained.
        report(name, *load_snapshot(folder), exact, samples, steps)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train the drafter head from scratch. An interrupted run goes on when it is "
        "started again with the same arguments."
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="walk through everything in a minute or two; the head that comes out is of no use, "
        "and is deleted unless --run says where to keep it",
    )
    parser.add_argument(
        "--run", type=Path, help="folder for all results (default: runs/full beside this file)"
    )
    parser.add_argument(
        "--start",
        type=Path,
        metavar="HEAD",
        help="go on training this exported head (bf16/) instead of a computed one; only the last "
        "phase is run",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="matrix products of sampling and training; f32 is for processors without fast bf16 "
        "(default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="torch threads (default: one per core)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and sampling (%(default)s)")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    budget = SMOKE if arguments.smoke else FULL
    dtype = DTYPES[arguments.dtype]
    if arguments.smoke and arguments.run is None:
        # A folder that is new every time: what is done already would not be done again.
        with tempfile.TemporaryDirectory(prefix="smollm2-mtp-") as folder:
            execute(Path(folder), budget, arguments.start, dtype, arguments.seed)
    else:
        run = arguments.run or RUN
        execute(run, budget, arguments.start, dtype, arguments.seed)
        print(f"The heads are in {run / 'bf16'} and {run / '4bit'}.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nrecipe.py: interrupted.", file=sys.stderr)
        sys.exit(130)
