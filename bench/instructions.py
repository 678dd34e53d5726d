#!/usr/bin/env python3
"""Count the instructions of a decoded token with callgrind, and compare with the counts that are kept.

Seconds differ from run to run and machine to machine; these counts do not, as valgrind offers every
machine the same processor. One thread, the demo model, greedy. Fails when a count has risen by more
than 5%. Standard library only, Python 3.9 or newer; needs valgrind.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
PROGRAM = ROOT / "target/release/mlxhost"
KEPT = BENCH / "instructions.json"
LIBRARY = "dylib" if sys.platform == "darwin" else "so"
PROMPT = "Explain what a computer program is."
# Two lengths, whose difference is nothing but decoding.
SHORT, LONG = 4, 16
MOST = 1.05

CASES = {
    "plain": ["--no-draft"],
    "qwen_mtp": ["--plugin", ROOT / f"plugins/qwen_mtp.{LIBRARY}", "--depth", "3"],
}


class CountError(Exception):
    """A failure whose text is all that the user needs to see."""


def total(flags: list[object], tokens: int) -> int:
    """Instructions of a whole run."""
    with tempfile.TemporaryDirectory() as folder:
        command: list[object] = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        command += [PROGRAM, "--threads", "1", "--temperature", "0", "--prompt", PROMPT]
        command += ["--max-tokens", tokens, *flags]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        raise CountError("\n".join(done.stderr.splitlines()[-3:]))
    return int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help=f"write the counts to {KEPT.name}")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise CountError("valgrind is not installed")
    if not PROGRAM.is_file():
        raise CountError(f"{PROGRAM.relative_to(ROOT)} is missing: run `make build`")
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    counts, risen = {}, False
    for name, flags in CASES.items():
        per_token = (total(flags, LONG) - total(flags, SHORT)) // (LONG - SHORT)
        counts[name] = per_token
        change = per_token / kept[name] if name in kept else 1.0
        print(f"{name:10} {per_token / 1e6:8.1f} million per token  {change - 1:+.1%}", flush=True)
        risen |= change > MOST
    if args.keep:
        KEPT.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
        return 0
    if risen:
        print("more than 5% above what is kept: find out why, or say why in the commit that keeps the new "
              "counts (--keep)", file=sys.stderr)
    return int(risen)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CountError as error:
        print(f"instructions: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
