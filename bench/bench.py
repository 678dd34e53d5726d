#!/usr/bin/env python3
"""Compare mlxhost with other engines, and drafters with plain decoding, in one run on this machine.

Each sample is a process of its own. Engines take turns, so that whatever else the machine does
meets all of them. The table shows medians; the JSON file has every sample.

Standard library only, Python 3.9 or newer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, Iterable, Iterator, Optional

import random_qwen

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
PROGRAM = ROOT / "target/release/mlxhost"
PEER_PYTHON = BENCH / ".venv/bin/python"
DEMO_MODEL = ROOT / "models/smollm2-135m-instruct"
LIBRARY = "dylib" if sys.platform == "darwin" else "so"

# The package that each peer needs, its script, and whether one sample is all it gets.
PEERS = {
    "llama.cpp": ("llama-cpp-python", "llama_cpp.py", False),
    "mlx-lm": ("mlx-lm", "mlx_lm.py", True),  # so slow on a CPU that more would be most of a run
}
ENGINES = ("mlxhost", "mlxhost-exact", *PEERS)
PLAIN = "plain"
DRAFTERS = (PLAIN, "qwen_mtp", "ngram")

LENGTHS = ("64", "512", "2048")
WIDTHS = ("1", "2", "4", "8", "16")


class BenchError(Exception):
    """A failure whose text is all that the user needs to see."""


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Children


class Children:
    """Runs one child at a time, and leaves none behind."""

    def __init__(self, threads: int) -> None:
        self.env = dict(os.environ)
        # BLAS libraries have no flag for it.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            self.env[name] = str(threads)

    def run(self, command: Iterable[object]) -> str:
        """What the child prints."""
        child = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a group of its own, to end its children too
        )
        try:
            out, err = child.communicate()
        except BaseException:
            self.end(child)
            raise
        if child.returncode != 0:
            raise BenchError(gist(err) or f"ended with status {child.returncode}")
        return out

    def json(self, command: Iterable[object]) -> Any:
        out = self.run(command)
        try:
            return json.loads(out)
        except ValueError:
            raise BenchError(f"expected JSON, got: {out[:200]!r}") from None

    @staticmethod
    def end(child: subprocess.Popen) -> None:
        """Asks the child to clean up, and kills what is left of its group after a moment."""
        for sign, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, None)):
            try:
                os.killpg(child.pid, sign)
            except (ProcessLookupError, PermissionError):
                pass  # all gone
            try:
                child.wait(patience)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                pass  # no more patience


def gist(text: str) -> str:
    """An error message; of a long one its beginning and its end."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines if len(lines) <= 6 else [*lines[:2], "...", *lines[-3:]])


# What to run


def versions(run: Children) -> dict[str, str]:
    """The program's, with its commit, and those of the installed peers."""
    found = {"mlxhost": run.run([PROGRAM, "--version"]).split()[-1], "python": platform.python_version()}
    try:
        found["commit"] = run.run(["git", "describe", "--always", "--dirty", "--exclude=*"]).strip()
    except (BenchError, OSError):
        pass  # not a clone
    if PEER_PYTHON.exists():
        script = (
            "import json, importlib.metadata as m; "
            "print(json.dumps([(d.metadata['Name'], d.version) for d in m.distributions()]))"
        )
        # Packages may spell their name either way.
        installed = {
            name.lower().replace("_", "-"): version
            for name, version in run.json([PEER_PYTHON, "-c", script])
        }
        wanted = [package for package, _, _ in PEERS.values()] + ["mlx"]
        found.update((name, installed[name]) for name in wanted if name in installed)
    return found


def engine_commands(args: argparse.Namespace, known: dict[str, str]) -> dict[str, list[object]]:
    """How to take a sample of each engine that is there."""
    common = ["--model", args.model, "--threads", args.threads]
    commands: dict[str, list[object]] = {}
    for name in filter(args.chosen, ENGINES):
        if name not in PEERS:
            exact = ["--exact"] if name == "mlxhost-exact" else []
            commands[name] = [PROGRAM, "bench", *common, "--json", *exact]
            continue
        package, script, _ = PEERS[name]
        if name == "llama.cpp" and args.model.is_dir():
            note("llama.cpp is left out: it reads only GGUF")
        elif package in known:
            quick = ["--quick"] if args.quick else []
            commands[name] = [PEER_PYTHON, BENCH / "peers" / script, *common, *quick]
        else:
            note(f"{name} is left out: it is not installed (`make bench-peers` does that)")
    return commands


def drafter_flags(args: argparse.Namespace) -> dict[str, list[object]]:
    """How each drafter is asked for. Plain decoding is always among them: it is the reference."""
    # The random model has no words to draft.
    names = [name for name in DRAFTERS if args.chosen(name) and not args.random_qwen]
    flags: dict[str, list[object]] = {PLAIN: ["--no-draft"]} if names else {}
    for name in names:
        if name == PLAIN:
            continue
        if name == "qwen_mtp" and args.drafter is None:
            note("qwen_mtp is left out: it needs a head for this model (--drafter DIR)")
            continue
        plugin = ROOT / "plugins" / f"{name}.{LIBRARY}"
        if not plugin.is_file():
            raise BenchError(f"{plugin.relative_to(ROOT)} is missing: run `make build`")
        flags[name] = ["--plugin", plugin]
        if name == "qwen_mtp":
            flags[name] += ["--drafter", args.drafter]
    return flags


def prompts(quick: bool) -> Iterator[tuple[str, int, str]]:
    """Class, number and text of each prompt."""
    classes = json.loads((BENCH / "prompts.json").read_text(encoding="utf-8"))
    for kind, texts in classes.items():
        for number, text in enumerate(texts[: 1 if quick else None]):
            yield kind, number, text


class Problems(list):
    """What went wrong, told at once and again at the end."""

    def add(self, text: str) -> None:
        note(f"PROBLEM: {text}")
        self.append(text)


def sample_engines(
    run: Children, commands: dict[str, list[object]], repetition: int, problems: Problems
) -> dict[str, dict]:
    """One sample of each engine. One that fails is not tried again."""
    samples = {}
    for name, command in list(commands.items()):
        if name in PEERS and PEERS[name][2] and repetition > 0:
            continue
        note(f"run {repetition + 1}: {name}")
        try:
            samples[name] = run.json(command)
        except BenchError as error:
            problems.add(f"{name}: {error}")
            del commands[name]
    return samples


class DrafterRuns:
    """Answers to the prompts, by plain decoding and by each drafter."""

    def __init__(self, run: Children, args: argparse.Namespace, problems: Problems) -> None:
        self.run = run
        self.flags = drafter_flags(args)
        self.command: list[object] = [PROGRAM, "--model", args.model, "--threads", args.threads]
        self.command += ["--max-tokens", args.max_tokens, "--temperature", 0, "--json"]
        self.prompts = list(prompts(args.quick))
        self.problems = problems
        self.samples: list[dict] = []
        self.reference: dict[tuple[str, int], list[int]] = {}

    def repeat(self, repetition: int) -> None:
        """One answer of each drafter to each prompt."""
        for kind, number, text in self.prompts if self.flags else ():
            note(f"run {repetition + 1}: {kind} {number + 1}")
            for drafter in list(self.flags):
                try:
                    answer = self.run.json([*self.command, *self.flags[drafter], "--prompt", text])
                except BenchError as error:
                    self.problems.add(f"{drafter}: {error}")
                    del self.flags[drafter]
                    if drafter == PLAIN:
                        self.flags.clear()  # nothing to compare with
                        return
                    continue
                self.check(kind, number, drafter, answer["tokens"])
                rounds, timings = answer["rounds"], answer["timings"]
                self.samples.append(
                    {
                        "class": kind,
                        "prompt": number,
                        "drafter": drafter,
                        "repetition": repetition,
                        # The first token comes from the prompt's own pass.
                        "tokens": max(len(answer["tokens"]) - 1, 0),
                        "passes": len(rounds),
                        "drafted": sum(len(one["drafted"]) for one in rounds),
                        "accepted": sum(one["accepted"] for one in rounds),
                        **timings,
                    }
                )

    def check(self, kind: str, number: int, drafter: str, tokens: list[int]) -> None:
        """The answer must be the one that plain decoding gave first, token for token."""
        right = self.reference.setdefault((kind, number), tokens)
        if tokens != right:
            pairs = enumerate(zip(tokens, right))
            at = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(right)))
            self.problems.add(f"{drafter} changes the answer to {kind} {number + 1} at token {at + 1}")

    def summary(self) -> list[dict]:
        """A line for each class and drafter, and for all classes together."""
        kinds = list(dict.fromkeys(sample["class"] for sample in self.samples))
        lines = []
        for kind in [*kinds, "all"] if len(kinds) > 1 else kinds:
            for drafter in DRAFTERS:
                chosen = [
                    sample
                    for sample in self.samples
                    if sample["drafter"] == drafter and kind in (sample["class"], "all")
                ]
                if chosen:
                    lines.append({"class": kind, "drafter": drafter, **self.line(chosen)})
        return lines

    def line(self, samples: list[dict]) -> dict[str, Optional[float]]:
        plain = {
            self.key(sample): sample["decode_tokens_per_s"]
            for sample in self.samples
            if sample["drafter"] == PLAIN
        }
        pairs = [(sample["decode_tokens_per_s"], plain[self.key(sample)]) for sample in samples]
        by_repetition: dict[int, list[dict]] = defaultdict(list)
        for sample in samples:
            by_repetition[sample["repetition"]].append(sample)
        drafted = total(samples, "drafted")
        return {
            "tokens_per_s": median(
                total(some, "tokens") / max(total(some, "decode_s"), 1e-9)
                for some in by_repetition.values()
            ),
            # Paired: the same prompt, moments apart.
            "times_plain": median(speed / reference for speed, reference in pairs if reference > 0)
            if any(reference > 0 for _, reference in pairs)
            else None,
            "accepted": total(samples, "accepted") / drafted if drafted else None,
            "tokens_per_pass": total(samples, "tokens") / max(total(samples, "passes"), 1),
        }

    @staticmethod
    def key(sample: dict) -> tuple[str, int, int]:
        return sample["class"], sample["prompt"], sample["repetition"]


def total(samples: list[dict], key: str) -> float:
    return sum(sample[key] for sample in samples)


def medians(samples: list[dict]) -> dict:
    """The median of each number, in the shape of one sample."""
    merged: dict = {}
    for key in dict.fromkeys(key for sample in samples for key in sample):
        values = [sample[key] for sample in samples if key in sample]
        if isinstance(values[0], dict):
            merged[key] = medians(values)
        elif isinstance(values[0], (int, float)):
            merged[key] = median(values)
    return merged


# What to show


def table(heads: list[str], rows: list[list[str]], left: int, groups: Optional[dict] = None) -> list[str]:
    """Aligned columns, the first `left` of them to the left. `groups` says which columns share a
    heading above their own: the first of them, how many, and the text."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in [heads, *rows]
    ]
    above = ""
    for first, (count, text) in (groups or {}).items():
        end = sum(widths[: first + count]) + 2 * (first + count - 1)
        start = sum(widths[:first]) + 2 * first
        above = above.ljust(start) + f" {text} ".center(end - start, "-")
    return [above.rstrip(), *lines] if above else lines


def shown(value: Optional[float], digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def engine_table(engines: dict[str, dict]) -> list[str]:
    heads = ["engine", "runs", "load s", *(f"at {length}" for length in LENGTHS), "decode t/s"]
    heads += [*(f"T={width}" for width in WIDTHS), "T4/T1", "peak MiB"]
    rows = []
    for name, engine in engines.items():
        sample = engine["median"]
        prefill, passes = sample.get("prefill", {}), sample.get("pass_ms", {})
        one, four = passes.get("1"), passes.get("4")
        peak = sample.get("peak_bytes")
        rows.append(
            [
                name,
                str(len(engine["samples"])),
                shown(sample.get("load_s"), 2),
                *(shown(prefill.get(length)) for length in LENGTHS),
                shown(sample.get("decode"), 1),
                *(shown(passes.get(width), 1) for width in WIDTHS),
                shown(four / one if one and four else None, 2),
                shown(peak / 2**20 if peak else None),
            ]
        )
    groups = {3: (3, "prefill tokens/s"), 7: (5, "ms for a pass over T tokens")}
    return table(heads, rows, left=1, groups=groups)


def drafter_table(lines: list[dict]) -> list[str]:
    heads = ["prompts", "drafter", "tokens/s", "x plain", "accepted", "tokens/pass"]
    rows = []
    for line in lines:
        accepted = line["accepted"]
        rows.append(
            [
                line["class"],
                line["drafter"],
                shown(line["tokens_per_s"], 1),
                shown(line["times_plain"], 2),
                "-" if accepted is None else f"{accepted:.0%}",
                shown(line["tokens_per_pass"], 2),
            ]
        )
    return table(heads, rows, left=2)


def show(results: dict) -> str:
    machine, settings = results["machine"], results["settings"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {settings['threads']} threads; {settings['model']}; "
        "medians",
        ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    ]
    if results["engines"]:
        lines += ["", *engine_table(results["engines"])]
    if results["prompts"]["summary"]:
        lines += ["", *drafter_table(results["prompts"]["summary"])]
    if results["problems"]:
        lines += ["", *(f"PROBLEM: {problem}" for problem in results["problems"])]
    return "\n".join(lines)


# The machine


def machine() -> dict:
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average_before": os.getloadavg()[0],
    }


def cores() -> int:
    """The cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


# The program


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("expected 1 or more")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    names = (*ENGINES, *DRAFTERS)
    flag("--repeat", type=positive, metavar="N", help="samples of each [default: 3, with --quick 1]")
    flag("--quick", action="store_true", help="a first look: less of everything")
    flag("--only", action="append", choices=names, metavar="NAME",
         help=f"run only this; repeatable: {', '.join(names)}")
    flag("--threads", type=positive, metavar="N", default=cores(),
         help="for every engine [default: all cores]")
    flag("--model", type=Path, metavar="PATH", help="a GGUF file, or an MLX folder, which llama.cpp does not read [default: the demo model]")
    flag("--random-qwen", action="store_true",
         help="instead of a model: the shape of Qwen3.5-0.8B with random weights of 4 bits; engines only")
    flag("--drafter", type=Path, metavar="DIR", help="the head for qwen_mtp [default: the demo model's]")
    flag("--out", type=Path, metavar="PATH", default=BENCH / "results.json",
         help="where the JSON goes [default: bench/results.json]")
    args = parser.parse_args()
    args.repeat = args.repeat or (1 if args.quick else 3)
    args.max_tokens = 32 if args.quick else 128
    args.chosen = lambda name: not args.only or name in args.only
    return args


def find_model(given: Optional[Path]) -> Path:
    if given is not None:
        if not given.exists():
            raise BenchError(f"{given}: no such file or folder")
        return given.resolve()
    found = sorted(DEMO_MODEL.glob("*.gguf"))
    if not found:
        raise BenchError("the demo model is missing: run `make model`")
    return found[0]


def find_drafter(given: Optional[Path], model: Path) -> Optional[Path]:
    """The head for qwen_mtp; the one that lies here goes with the demo model only."""
    if given is not None:
        if not given.is_dir():
            raise BenchError(f"{given}: no such folder")
        return given.resolve()
    return ROOT / "models/smollm2-mtp/4bit" if model.parent == DEMO_MODEL else None


def write_results(path: Path, results: dict) -> None:
    """In one step: an interrupted run leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise BenchError(f"{path}: can't write: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def bench(args: argparse.Namespace) -> int:
    args.model = random_qwen.made(BENCH / ".cache") if args.random_qwen else find_model(args.model)
    args.drafter = find_drafter(args.drafter, args.model)
    if not PROGRAM.is_file():
        raise BenchError(f"{PROGRAM.relative_to(ROOT)} is missing: run `make build`")
    if not args.out.parent.is_dir():
        raise BenchError(f"{args.out.parent}: no such folder")
    results = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    if results["machine"]["load_average_before"] > 0.5:
        note("this machine was busy just now: if it still is, the numbers will suffer")

    run = Children(args.threads)
    problems = Problems()
    known = versions(run)
    commands = engine_commands(args, known)
    answers = DrafterRuns(run, args, problems)
    samples: dict[str, list[dict]] = {name: [] for name in commands}
    for repetition in range(args.repeat):
        for name, sample in sample_engines(run, commands, repetition, problems).items():
            samples[name].append(sample)
        answers.repeat(repetition)

    results.update(
        settings={
            "model": args.model.name,
            "threads": args.threads,
            "repeat": args.repeat,
            "quick": args.quick,
            "max_tokens": args.max_tokens,
        },
        versions=known,
        engines={
            name: {"median": medians(some), "samples": some} for name, some in samples.items() if some
        },
        prompts={"summary": answers.summary(), "samples": answers.samples},
        problems=problems,
    )
    write_results(args.out, results)
    print(show(results))
    return 1 if problems else 0


def interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    args = arguments()
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, interrupt)
    try:
        return bench(args)
    except BenchError as error:
        note(f"bench: {error}")
        return 1
    except KeyboardInterrupt:
        note("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
