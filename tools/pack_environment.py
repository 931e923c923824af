"""Pack the environment that `make gpu` made, and this project, for a machine without internet.

    .venv/bin/python -m tools.pack_environment OUT [--part-mib 60] [--leave-out FILE] [--without FILE] [--only-gpu 90]

OUT gets numbered parts of at most ``--part-mib`` MiB, ``manifest.json`` with their checksums, and two small programs.
Copy all these files to the target, in any order. There ``sh unpack.sh FOLDER`` makes FOLDER a clone of this project
with .venv. The target needs only a Python of the same version as .venv's. Three options make the parts smaller:

--leave-out lists the packages of the target's Python, as `pip freeze` prints them there. Packages that have the same
version here are not packed. A line with only a name leaves out that package at any version.
--without lists what nobody needs there: names of packages, or patterns of files below site-packages, with a slash.
--only-gpu keeps only the GPU code of one compute capability (90 is 9.0: H100, H200; see tools/strip_gpu_code.py).

With ``--project-only`` the environment's parts in OUT stay, and only the project is packed again, into later parts.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.metadata
import io
import json
import lzma
import mmap
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tools.gpu_lock import read_lock
from tools.strip_gpu_code import blank_other_gpus

ROOT: Final = Path(__file__).parents[1]
UNPACK: Final = Path(__file__).with_name("unpack_environment.py")
_BLOCK: Final = 64 << 20
"""Bytes that are compressed together. Such a block compresses well, and there are blocks enough for all cores."""
_THREADS: Final = min(8, os.cpu_count() or 1)
_EDITABLE: Final = "__editable__"
"""Prefix of files that say where an editable package is. They hold a path of this machine, and are not packed."""

_HEAD_OF_PROGRAM: Final = re.compile(rb"\A#!(?:/bin/sh\n'''exec' .*\n' '''|/.*/python[0-9.]*$)", re.MULTILINE)
"""Beginning of a program that pip wrote: a line with the path of its Python, or three lines if this path is long."""
_STARTS_ANYWHERE: Final = rb"""#!/bin/sh
'''exec' "$(dirname "$(realpath "$0")")/python" "$0" "$@"
' '''"""
"""Replaces that beginning. The shell reads a command that starts the Python beside the program; Python reads text."""

_UNPACK_SH: Final = """\
#!/bin/sh
# sh unpack.sh FOLDER: check the parts beside this file and unpack them. Needs Python {python} (PYTHON=... names it).
for python in "${{PYTHON:-python{python}}}" python3; do
  if "$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "{python}")' 2>/dev/null; then
    exec "$python" "$(dirname "$0")/unpack.py" "$@"
  fi
done
echo "unpack.sh: this environment is for Python {python}; looked for ${{PYTHON:-python{python}}} and python3." \\
  "Name one: PYTHON=/path/to/python{python} sh unpack.sh ..." >&2
exit 1
"""


class Parts:
    """A file to write to, whose bytes are compressed block by block and cut into numbered files."""

    def __init__(
        self, folder: Path, part_bytes: int, preset: int = 6, kept: Iterable[dict[str, str | int]] = ()
    ) -> None:
        self._folder, self._part_bytes = folder, part_bytes
        # Most of it is machine code of x86. With preset 6 a thread takes 0.7 GB.
        options = {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": _BLOCK}
        self._compress = partial(lzma.compress, filters=({"id": lzma.FILTER_X86}, options))
        self._pool = ThreadPoolExecutor(_THREADS)  # lzma works without the interpreter's lock
        self._waiting: deque[Future[bytes]] = deque()
        self._block, self._part, self._written = bytearray(), bytearray(), 0
        self.manifest = list(kept)

    def write(self, data: bytes) -> int:
        self._block += data
        self._written += len(data)
        if len(self._block) >= _BLOCK:
            self._compress_block()
        return len(data)

    def tell(self) -> int:
        return self._written

    def end_part(self) -> None:
        """Write all bytes so far. Later bytes begin a new part."""
        self._compress_block()
        while self._waiting:
            self._take()
        if self._part:
            self._write_part(self._part)
            self._part.clear()

    def close(self) -> None:
        self.end_part()
        self._pool.shutdown()

    def _compress_block(self) -> None:
        self._waiting.append(self._pool.submit(self._compress, bytes(self._block)))
        self._block.clear()
        if len(self._waiting) > 2 * _THREADS:
            self._take()

    def _take(self) -> None:
        self._part += self._waiting.popleft().result()
        while len(self._part) >= self._part_bytes:
            self._write_part(self._part[: self._part_bytes])
            del self._part[: self._part_bytes]

    def _write_part(self, data: bytes) -> None:
        name = f"part_{len(self.manifest):03d}"
        (self._folder / name).write_bytes(data)
        self.manifest.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


@dataclass(frozen=True)
class Choice:
    """The options that decide what is packed. ``leave_out`` and ``without`` hold the lines of the options' files."""

    leave_out: Sequence[str] = ()
    without: Sequence[str] = ()
    only_gpu: int | None = None
    preset: int = 6
    project_only: bool = False


def pack(root: Path, out: Path, part_bytes: int, choice: Choice = Choice()) -> dict[str, Any]:
    """Pack the git clone ``root`` with its ``.venv`` into ``out``, and return the manifest.

    Raises:
        SystemExit: there is no complete environment here, or ``choice`` names packages or files that it does not have.
    """
    (site,) = (root / ".venv").glob("lib/python3*/site-packages")
    python, commit = site.parent.name.removeprefix("python"), _commit(root)
    manifest = _kept(out) if choice.project_only else {"python": python, "environment": 0, "left_out": [], "parts": []}
    out.mkdir(parents=True, exist_ok=True)
    for old in (out / "manifest.json", *sorted(out.glob("part_*"))[manifest["environment"] :]):
        old.unlink(missing_ok=True)
    parts = Parts(out, part_bytes, choice.preset, manifest["parts"][: manifest["environment"]])
    with tarfile.open(fileobj=parts, mode="w") as archive:  # type: ignore[call-overload]
        if not choice.project_only:
            manifest["left_out"], files = _chosen(site, choice)
            for path in files:
                _add(archive, path, root, choice.only_gpu)
            parts.end_part()
            manifest["environment"] = len(parts.manifest)
        for path in _project(root):
            _add(archive, path, root)
    parts.close()
    manifest |= {"commit": commit, "parts": parts.manifest}
    (out / "unpack.sh").write_text(_UNPACK_SH.format_map(manifest))
    shutil.copyfile(UNPACK, out / "unpack.py")
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))  # last: parts without it were cut short
    return manifest


def _kept(out: Path) -> dict[str, Any]:
    """Return the manifest of an earlier packing whose environment stays. Raises SystemExit if there is none."""
    if not (out / "manifest.json").is_file():
        raise SystemExit(f"pack_environment: --project-only needs an environment that was packed; {out} has none")
    manifest: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return manifest


def _commit(root: Path) -> str:
    """Return the short commit, with "+changes" where tracked files differ from it; before the first commit "none"."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+changes"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip() or "none"


def _chosen(site: Path, choice: Choice) -> tuple[list[str], list[Path]]:
    """Return (packages that the target must have, as NAME==VERSION; files to pack).

    Raises:
        SystemExit: lines of ``choice.without`` name no package and no file here.
    """
    packages = {_normal(each.name): each for each in importlib.metadata.distributions(path=[str(site)])}
    left_out = _left_out(packages, choice.leave_out)
    lines = [text for line in choice.without if (text := line.partition("#")[0].strip())]
    patterns = {line for line in lines if "/" in line}
    unused = {_normal(line) for line in lines if line not in patterns}
    kept = packages.keys() - set(left_out) - unused
    files, matched = [], set()
    for path in sorted({path for name in kept for path in _files_of(packages[name])}):
        matching = [each for each in patterns if fnmatch.fnmatch(os.path.relpath(path, site), each)]
        matched.update(matching)
        if not matching:
            files.append(path)
    if wrong := sorted({*unused - packages.keys(), *patterns - matched}):
        raise SystemExit(f"pack_environment: --without names what is not in .venv: {', '.join(wrong)}")
    return [f"{name}=={packages[name].version}" for name in left_out], files


def _left_out(packages: Mapping[str, importlib.metadata.Distribution], lines: Iterable[str]) -> list[str]:
    """Return the packages that the target has, and print each package of which the target has another version."""
    names = []
    for line in lines:
        if not (found := re.fullmatch(r"([A-Za-z0-9._-]+)(?:===?(\S+))?", line.strip())):
            continue
        name, version = _normal(found[1]), found[2]
        if name in packages and version in (None, packages[name].version):
            names.append(name)
        elif name in packages:
            print(f"{name}: the target has {version}; {packages[name].version} is packed")
    return names


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _files_of(package: importlib.metadata.Distribution) -> Iterator[Path]:
    """Yield the files of an installed package, without compiled Python and without paths of this machine."""
    if package.files is None:
        raise SystemExit(
            f"pack_environment: {package.name} has no list of its files (RECORD); install it again with pip"
        )
    for file in package.files:
        path = Path(os.path.normpath(str(package.locate_file(file))))
        if file.suffix != ".pyc" and not file.name.startswith(_EDITABLE) and file.name != "direct_url.json":
            yield path


def _project(root: Path) -> Iterator[Path]:
    """Yield the files of the clone that git tracks, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(root / name):
            yield root / name


def _add(archive: tarfile.TarFile, path: Path, root: Path, only_gpu: int | None = None) -> None:
    entry = archive.gettarinfo(path, str(path.relative_to(root)))
    entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, "", ""
    if not entry.isreg():
        archive.addfile(entry)
    elif path.parent == root / ".venv/bin":
        program = _HEAD_OF_PROGRAM.sub(_STARTS_ANYWHERE, path.read_bytes(), count=1)
        entry.size = len(program)
        archive.addfile(entry, io.BytesIO(program))
    elif only_gpu and entry.size and ".so" in path.suffixes:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as library:
            try:
                before, after = blank_other_gpus(library, only_gpu)
            except ValueError as problem:
                raise SystemExit(f"pack_environment: {path}: {problem}") from None
            if before:
                print(f"{entry.name}: {after / 2**20:.1f} MiB of {before / 2**20:.1f} MiB of GPU code stay")
            archive.addfile(entry, library)
    else:
        with path.open("rb") as file:
            archive.addfile(entry, file)


def problem_of_environment(root: Path) -> str:
    """Return why the ``.venv`` of ``root`` cannot be packed; empty if it can."""
    stamp = root / ".venv/.installed"  # see setup.sh
    kind, _, key = stamp.read_text().partition(" ") if stamp.exists() else ("", "", "")
    if not key or not kind.startswith("gpu"):
        return "there is no whole .venv for GPUs here"
    there = importlib.metadata.distributions(path=[str(each) for each in root.glob(".venv/lib/python3*/site-packages")])
    found = {_normal(each.name): each.version for each in there}
    wrong = [
        f"{name} {found.get(name, 'missing')} instead of {version}"
        for name, version in read_lock("gpu.lock").items()
        if found.get(name, "").partition("+")[0] != version.partition("+")[0]
    ]
    return f".venv is not that of requirements/gpu.lock: {', '.join(wrong)}" if wrong else ""


def _lines(path: Path | None) -> Sequence[str]:
    return path.read_text().splitlines() if path else ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for the parts")
    parser.add_argument("--part-mib", type=float, default=60, help="largest part, in 2**20 bytes")
    parser.add_argument("--leave-out", type=Path, metavar="FILE", help="what the target has")
    parser.add_argument("--without", type=Path, metavar="FILE", help="what nobody needs there")
    parser.add_argument("--only-gpu", type=int, metavar="CC", help="compute capability, such as 90")
    parser.add_argument("--preset", type=int, choices=range(10), default=6, help="xz's; 0 is the fastest, and larger")
    parser.add_argument("--project-only", action="store_true", help="the environment's parts stay")
    options = parser.parse_args()
    if problem := problem_of_environment(ROOT):
        sys.exit(f"pack_environment: {problem}; run `make gpu` first")
    lines = _lines(options.leave_out), _lines(options.without)
    choice = Choice(*lines, options.only_gpu, options.preset, options.project_only)
    manifest = pack(ROOT, options.out, int(options.part_mib * 2**20), choice)
    sizes = [part["bytes"] for part in manifest["parts"]]
    print(f"{len(sizes)} parts, {sum(sizes) / 2**20:.0f} MiB, in {options.out}; there: sh unpack.sh FOLDER")


if __name__ == "__main__":
    main()
