#!/usr/bin/env python3
"""What answering requests together gains, with a drafter and without one.

The requests are the prompts of prompts.json. Ways take turns, each run is a process of its own; every way has to
give the same answers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench import BENCH, LIBRARY, PROGRAM, ROOT, BenchError, Children, cores, cpu_model, note
from bench import positive, prompts, shown, table

CONCURRENCY = (1, 2, 4, 8)
WAYS = ("plain", "qwen_mtp", "ngram")


def run_once(run: Children, way: str, together: int, requests: Path, args: argparse.Namespace) -> dict:
    """Tokens per second, and the answers by id."""
    with tempfile.TemporaryDirectory() as scratch:
        answers = Path(scratch) / "answers.jsonl"
        drafter = ["--no-draft"] if way == "plain" else ["--plugin", ROOT / f"plugins/{way}.{LIBRARY}"]
        command = [PROGRAM, "batch", "--input", requests, "--output", answers, "--concurrency", together]
        command += ["--threads", args.threads, "--max-tokens", args.max_tokens, "--temperature", 0]
        # Its last line goes to the error output: `... tokens in 3.5 s (333.3 tokens/s)`.
        told = run.run(["sh", "-c", '"$0" "$@" 2>&1', *command, "--ignore-eos", *drafter])
        speed = re.search(r"\(([0-9.]+) tokens/s\)", told)
        if speed is None:
            raise BenchError(f"expected a speed, got: {told[-200:]!r}")
        lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    first = [line["timings"]["prefill_s"] for line in lines]
    return {
        "tokens_per_s": float(speed[1]),
        "prefill_s": median(first),
        "answers": {line["id"]: line["tokens"] for line in lines},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="runs of each [default: 3]")
    parser.add_argument("--threads", type=positive, default=cores(), metavar="N")
    parser.add_argument("--max-tokens", type=positive, default=96, metavar="N")
    args = parser.parse_args()
    run = Children(args.threads)
    speeds: dict[tuple[str, int], list[dict]] = {}
    reference = None
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        for kind, number, text in sorted(prompts(False), key=lambda prompt: prompt[1]):
            print(json.dumps({"id": f"{kind} {number + 1}", "prompt": text}), file=file)
        file.flush()
        for repetition in range(args.repeat):
            for together in CONCURRENCY:
                for way in WAYS:
                    note(f"run {repetition + 1}: {way}, {together} at a time")
                    sample = run_once(run, way, together, Path(file.name), args)
                    answers = sample.pop("answers")
                    reference = reference or answers
                    if answers != reference:
                        raise BenchError(f"{way}, {together} at a time: the answers differ")
                    speeds.setdefault((way, together), []).append(sample)
    rows = []
    for way in WAYS:
        speed = lambda n, way=way: [sample["tokens_per_s"] for sample in speeds[way, n]]
        rows.append([way, *(shown(median(speed(n)), 1) for n in CONCURRENCY)])
        if way != "plain":
            pairs = lambda n: zip(speed(n), (s["tokens_per_s"] for s in speeds["plain", n]))
            rows.append(["  x plain", *(shown(median(a / b for a, b in pairs(n)), 2) for n in CONCURRENCY)])
    waits = [shown(1000 * median(s["prefill_s"] for s in speeds["plain", n])) for n in CONCURRENCY]
    rows.append(["ms to the first token, plain", *waits])
    print(f"{cpu_model()}, {cores()} cores, {args.threads} threads; tokens/s of all requests, medians\n")
    print("\n".join(table(["requests at a time", *map(str, CONCURRENCY)], rows, left=1)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        note(f"bench: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(130)
