"""Unpack what tools/pack_environment.py packed: ``sh unpack.sh FOLDER``. Needs only Python's standard library.

FOLDER becomes a clone with its .venv: FOLDER/.venv/bin/or1. Packages that were left out come from the Python that runs
this program. Links to that Python's CUDA libraries are made where torch looks for them. After an interruption the same
command continues. If everything is there already, it says so and does nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import lzma
import site
import sys
import tarfile
import venv
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO


class Joined:
    """Files, one after the other, as one file to read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = iter(paths)
        self._file: BinaryIO = BytesIO()

    def read(self, size: int) -> bytes:
        while not (data := self._file.read(size)):
            self._file.close()
            if (path := next(self._paths, None)) is None:
                self._file = BytesIO()
                return b""
            self._file = path.open("rb")
        return data


def problem_of(part: Path, size: int, sha256: str) -> str:
    """Return what is wrong with a part; "" if nothing is wrong."""
    if not part.is_file():
        return f"{part} is missing; its sha256 is {sha256}"
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        return f"{part} is damaged: {part.stat().st_size} of {size} bytes, sha256 {found}; expected {sha256}"
    return ""


def extract(parts: Sequence[Path], folder: Path) -> None:
    """Extract the archive. Skip files that are in ``folder`` already with the archive's size and time.

    A file gets its time after its bytes, so a file that was cut short has another time.
    """
    with (
        lzma.open(Joined(parts)) as stream,  # type: ignore[call-overload]
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for entry in archive:
            target = folder / entry.name
            if entry.isfile() and target.is_file() and not target.is_symlink():
                there = target.stat()
                if (there.st_size, int(there.st_mtime)) == (entry.size, int(entry.mtime)):
                    continue
            target.unlink(missing_ok=True)
            archive.extract(entry, folder, filter="tar")


def missing_here(names: Sequence[str]) -> list[str]:
    """Return the packages in ``names`` that this Python does not have in any version."""
    missing = []
    for name in names:
        try:
            importlib.metadata.distribution(name.partition("==")[0])
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def link_libraries(names: Sequence[str], packages: Path) -> None:
    """Make links to NVIDIA's libraries of packages that were left out, because torch looks for them beside itself."""
    for name in names:
        for file in importlib.metadata.distribution(name.partition("==")[0]).files or ():
            target = packages / str(file)
            if file.parts[0] == "nvidia" and not target.is_file():
                target.unlink(missing_ok=True)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(file.locate())


def unpack(source: Path, folder: Path) -> str:
    """Unpack the parts in ``source`` into ``folder``, and return what was done.

    Raises:
        SystemExit: parts are missing or damaged (the message has their checksums), or packages that were left out are
            missing in this Python.
    """
    text = (source / "manifest.json").read_text()
    manifest, stamp = json.loads(text), f"packed {hashlib.sha256(text.encode()).hexdigest()}"
    environment = folder / ".venv"
    if (done := environment / ".installed").is_file() and done.read_text() == stamp:
        return f"{folder} has all of it already"
    parts = [source / part["name"] for part in manifest["parts"]]
    problems = [
        problem_of(path, part["bytes"], part["sha256"]) for path, part in zip(parts, manifest["parts"], strict=True)
    ]
    if found := [f"unpack: {problem}\n" for problem in problems if problem]:
        raise SystemExit("".join(found) + "unpack: copy these parts again; nothing was unpacked")
    if missing := missing_here(manifest["left_out"]):
        raise SystemExit(
            f"unpack: {sys.executable} lacks what was left out of the parts: {', '.join(missing)}; "
            "PYTHON=... names another Python; nothing was unpacked"
        )
    done.unlink(missing_ok=True)
    venv.create(environment, symlinks=True)
    extract(parts, folder)
    packages = environment / "lib" / f"python{manifest['python']}" / "site-packages"
    paths = [str(folder), *([*site.getsitepackages(), site.getusersitepackages()] if manifest["left_out"] else [])]
    link_libraries(manifest["left_out"], packages)
    (environment / "packed.json").write_text(text)
    (packages / "or1_megatron.pth").write_text("".join(f"{path}\n" for path in paths))
    done.write_text(stamp)  # last; tools/setup.sh then leaves this environment alone
    return f"{folder} is ready: {environment / 'bin/or1'} doctor"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: sh unpack.sh FOLDER")
    print(unpack(Path(__file__).resolve().parent, Path(sys.argv[1]).resolve()))
