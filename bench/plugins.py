#!/usr/bin/env python3
"""What plugins at hand add to the start of the program.

Builds of ngram with names and digests of their own lie in a directory. A batch of one request loads all of them, and
so does none with an empty directory. The two take turns, each run is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from bench import LIBRARY, PROGRAM, ROOT, BenchError, Children, cores, cpu_model, positive

# So small that what is left of the start is the program's own.
MODEL = ROOT / "tests/fixtures/oracle/ckpt/llama-f32"
NAME = b'"name":"ngram"'


def builds(directory: Path, count: int) -> None:
    """Writes so many plugins, all different."""
    whole = (ROOT / f"plugins/ngram.{LIBRARY}").read_bytes()
    if NAME not in whole:
        raise BenchError("the plugin ngram does not say its name as expected")
    for number in range(count):
        name = b'"name":"n%04d"' % number
        (directory / f"n{number:04}.{LIBRARY}").write_bytes(whole.replace(NAME, name))


def start(run: Children, directory: Path, scratch: Path) -> float:
    """Seconds of a run that loads what is in the directory."""
    answers = scratch / "answers.jsonl"
    answers.unlink(missing_ok=True)
    command = [PROGRAM, "batch", "--input", scratch / "one.jsonl", "--output", answers, "--plugin-dir", directory]
    begun = time.perf_counter()
    run.run([*command, "--model", MODEL, "--max-tokens", 1])
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plugins", type=positive, default=20, metavar="N", help="how many [default: 20]")
    parser.add_argument("--repeat", type=positive, default=30, metavar="N", help="pairs of runs [default: 30]")
    args = parser.parse_args()
    run = Children(cores())
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        some, none = scratch / "some", scratch / "none"
        some.mkdir()
        none.mkdir()
        builds(some, args.plugins)
        request = {"prompt_tokens": [1, 2, 3], "drafter": "none"}
        (scratch / "one.jsonl").write_text(json.dumps(request), encoding="utf-8")
        more = []
        for _ in range(args.repeat):
            without = start(run, none, scratch)
            more.append(1000 * (start(run, some, scratch) - without))
    low, _, high = quantiles(more, n=4) if len(more) > 1 else (more[0],) * 3
    print(f"{cpu_model()}, {cores()} cores")
    print(f"{args.plugins} plugins: {median(more):.0f} ms more, quartiles {low:.0f} to {high:.0f}, of {args.repeat} pairs")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
