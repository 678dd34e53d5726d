"""What one sample of a peer measures, and how: the same passes as `mlxhost bench`."""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Protocol

# The cache is this long when decoding starts, and below every pass of `pass_ms`.
PROMPT = 64


class Engine(Protocol):
    """A loaded model with one sequence."""

    vocab: int

    def forward(self, tokens: list[int], all_rows: bool = False) -> int:
        """Append `tokens` in one pass; logits of the last or of all. The likeliest next token."""

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` tokens."""


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    prefill: tuple[int, ...] = (64, 512, 2048)
    decode: int = 128
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    passes: int = 9


QUICK = Plan(prefill=(64, 512), decode=32, passes=3)


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags that every peer takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--quick", action="store_true", help="measure less")
    return parser


def peak_bytes() -> int:
    """The most memory that this process ever had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def report(load: Callable[[], Engine], plan: Plan, threads: int) -> None:
    """Load, measure, and print the sample as one JSON object."""
    start = time.perf_counter()
    engine = load()
    sample = {"load_s": time.perf_counter() - start}
    sample.update(measure(engine, plan))
    sample.update(peak_bytes=peak_bytes(), threads=threads)
    print(json.dumps(sample))


def measure(engine: Engine, plan: Plan) -> dict:
    """The speeds of `engine`. What the tokens say has no influence on them: they are random."""
    rng = random.Random(1)
    tokens = [rng.randrange(engine.vocab) for _ in range(max(plan.prefill))]
    engine.forward(tokens[:8])  # warm-up

    prefill = {}
    for n in sorted(plan.prefill, reverse=True):
        engine.rollback(0)
        start = time.perf_counter()
        token = engine.forward(tokens[:n])
        prefill[str(n)] = n / (time.perf_counter() - start)

    # The last prompt was the shortest, PROMPT tokens: decoding goes on from there.
    start = time.perf_counter()
    for _ in range(plan.decode):
        token = engine.forward([token])
    decode = plan.decode / (time.perf_counter() - start)

    pass_ms = {}
    for width in plan.widths:
        times = []
        for _ in range(1 + plan.passes):
            engine.rollback(PROMPT)
            start = time.perf_counter()
            engine.forward(tokens[:width], all_rows=True)
            times.append(1000 * (time.perf_counter() - start))
        pass_ms[str(width)] = statistics.median(times[1:])  # the first is a warm-up

    return {"prefill": prefill, "decode": decode, "pass_ms": pass_ms}
