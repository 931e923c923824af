"""Pack what `make gpu` made, with this project, for a machine without internet.

    .venv/bin/python tools/pack_environment.py OUT [--part-mb 60] [--leave-out FILE]

OUT gets numbered parts of at most ``--part-mb`` megabytes, ``manifest.json`` with their checksums, and two small
programs. Carry all of it to the target, in any order; there ``sh unpack.sh FOLDER`` makes of FOLDER a clone with .venv.
The target needs a Python of the same version as .venv's, and nothing else. FILE lists what the target's Python has, as
`pip freeze` prints it there: what has the same version here is left out and taken from there. A line with a name
alone leaves a package out whatever its version.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
UNPACK: Final = Path(__file__).with_name("unpack_environment.py")
_BLOCK: Final = 32 << 20
"""Bytes that are compressed together: enough to compress well, and for all cores to have work."""
_EDITABLE: Final = "__editable__"
"""How the files begin that say where an editable package is: they hold a path of this machine."""

_HEAD_OF_PROGRAM: Final = re.compile(rb"\A#!(?:/bin/sh\n'''exec' .*\n' '''|/.*/python[0-9.]*$)", re.MULTILINE)
"""How a program begins that pip wrote: with the path of its Python, or with two lines more where the path is long."""
_STARTS_ANYWHERE: Final = rb"""#!/bin/sh
'''exec' "$(dirname "$(realpath "$0")")/python" "$0" "$@"
' '''"""
"""For the shell a command that starts the Python beside the program, for Python a string."""

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

    def __init__(self, folder: Path, part_bytes: int) -> None:
        self._folder, self._part_bytes = folder, part_bytes
        self._pool = ThreadPoolExecutor(os.cpu_count())  # lzma works without the interpreter's lock
        self._waiting: deque[Future[bytes]] = deque()
        self._block, self._part, self._written = bytearray(), bytearray(), 0
        self.manifest: list[dict[str, str | int]] = []

    def write(self, data: bytes) -> int:
        self._block += data
        self._written += len(data)
        if len(self._block) >= _BLOCK:
            self._compress_block()
        return len(data)

    def tell(self) -> int:
        return self._written

    def close(self) -> None:
        self._compress_block()
        while self._waiting:
            self._take()
        if self._part:
            self._write_part(self._part)
        self._pool.shutdown()

    def _compress_block(self) -> None:
        self._waiting.append(self._pool.submit(lzma.compress, bytes(self._block)))
        self._block.clear()
        if len(self._waiting) > 2 * (os.cpu_count() or 1):
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


def pack(root: Path, out: Path, part_bytes: int, leave_out: Iterable[str] = ()) -> dict[str, object]:
    """Pack the git clone ``root`` with its ``.venv`` into ``out``, and return the manifest.

    Raises:
        SystemExit: there is no whole environment here.
    """
    (site,) = (root / ".venv").glob("lib/python3*/site-packages")
    packages = {_normal(each.name): each for each in importlib.metadata.distributions(path=[str(site)])}
    left_out = _left_out(packages, leave_out)
    files = {path for name, each in packages.items() if name not in left_out for path in _files_of(each)}
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("part_*"), *out.glob("manifest.json")):
        old.unlink()
    parts = Parts(out, part_bytes)
    with tarfile.open(fileobj=parts, mode="w") as archive:  # type: ignore[call-overload]
        for path in sorted({*_project(root), *files}):
            _add(archive, path, root)
    parts.close()
    manifest = {
        "python": site.parent.name.removeprefix("python"),
        "left_out": [f"{name}=={packages[name].version}" for name in left_out],
        "parts": parts.manifest,
    }
    (out / "unpack.sh").write_text(_UNPACK_SH.format_map(manifest))
    shutil.copyfile(UNPACK, out / "unpack.py")
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))  # last: parts without it were cut short
    return manifest


def _left_out(packages: dict[str, importlib.metadata.Distribution], lines: Iterable[str]) -> list[str]:
    """Return which packages the target has, and print those of which it has another version."""
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


def _add(archive: tarfile.TarFile, path: Path, root: Path) -> None:
    entry = archive.gettarinfo(path, str(path.relative_to(root)))
    entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, "", ""
    if not entry.isreg():
        archive.addfile(entry)
    elif path.parent == root / ".venv/bin":
        program = _HEAD_OF_PROGRAM.sub(_STARTS_ANYWHERE, path.read_bytes(), count=1)
        entry.size = len(program)
        archive.addfile(entry, io.BytesIO(program))
    else:
        with path.open("rb") as file:
            archive.addfile(entry, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for the parts")
    parser.add_argument("--part-mb", type=float, default=60, help="largest part, in 10**6 bytes")
    parser.add_argument("--leave-out", type=Path, help="what the target has")
    options = parser.parse_args()
    stamp = ROOT / ".venv/.installed"
    if not stamp.exists() or " " not in stamp.read_text():  # see setup.sh
        sys.exit("pack_environment: there is no whole .venv here; run `make gpu` first")
    lines = options.leave_out.read_text().splitlines() if options.leave_out else ()
    manifest = pack(ROOT, options.out, int(options.part_mb * 1e6), lines)
    sizes = [part["bytes"] for part in manifest["parts"]]  # type: ignore[attr-defined]
    print(f"{len(sizes)} parts, {sum(sizes) / 1e9:.2f} GB, in {options.out}; there: sh unpack.sh FOLDER")


if __name__ == "__main__":
    main()
