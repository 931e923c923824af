"""Strip from shared libraries, without linking them again, the GPU code that one kind of GPU never runs.

CUDA libraries hold each kernel once for each kind of GPU, in containers ("fat binaries"). An entry of a container is
machine code (cubin), or PTX, which the driver compiles. The driver takes the entry that fits its GPU best. This module
moves that entry to the front of its container, corrects the length in the container's header, and fills the remaining
bytes with zeros. Tables that only debuggers read become zeros too. The file keeps its size, but zeros compress to
almost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_SECTIONS: Final = (".nv_fatbin", "__nv_relfatbin")
_DEBUGGERS: Final = (".symtab", ".strtab", ".debug", ".zdebug")
_MAGIC: Final = 0xBA55ED50
_PTX, _CUBIN = 1, 2
_LOADED: Final = 2  # SHF_ALLOC: the section is read into memory when the library is loaded
_NO_BYTES: Final = 8  # SHT_NOBITS: the section has no bytes in the file


class Bytes(Protocol):
    """What a bytearray and a mapped file have in common."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> bytes | bytearray: ...
    def __setitem__(self, where: slice, value: bytes, /) -> None: ...


@dataclass(frozen=True)
class Section:
    name: str
    start: int
    end: int
    loaded: bool


@dataclass(frozen=True)
class Code:
    """One entry of a fat binary: its compute capability (90 is 9.0), and its bytes in the file with their header."""

    kind: int
    capability: int
    start: int
    end: int


@dataclass(frozen=True)
class Container:
    """A fat binary: where it starts in the file, the bytes of its header, and its entries in their order."""

    start: int
    header: int
    entries: Sequence[Code]


def blank_other_gpus(library: Bytes, capability: int) -> tuple[int, int]:
    """Remove, in place, the code that a GPU of this compute capability (90 is 9.0) does not run.

    Returns:
        The bytes of GPU code before and after. A file that is no 64-bit ELF library stays as it is: (0, 0).

    Raises:
        ValueError: a fat binary is not built as expected; nothing was changed.
    """
    sections = list(_sections(library))
    containers = [each for section in sections if section.name in _SECTIONS for each in _containers(library, section)]
    before = after = 0
    for container in containers:
        kept = _run_by(container.entries, capability)
        before += sum(code.end - code.start for code in container.entries)
        after += sum(code.end - code.start for code in kept)
        _keep(library, container, kept)
    for section in sections:
        if not section.loaded and section.name.startswith(_DEBUGGERS):
            library[section.start : section.end] = bytes(section.end - section.start)
    return before, after


def _keep(library: Bytes, container: Container, kept: Sequence[Code]) -> None:
    """Leave only the entries ``kept`` in a container, one after the other, and end the container after them."""
    first, end = container.start + container.header, container.entries[-1].end
    body = b"".join(library[code.start : code.end] for code in kept)
    library[container.start + 8 : container.start + 16] = struct.pack("<Q", len(body))
    library[first:end] = body + bytes(end - first - len(body))


def _sections(library: Bytes) -> Iterator[Section]:
    if library[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack("<Q", library[0x28:0x30])
    size, count, names = struct.unpack("<HHH", library[0x3A:0x40])
    rows = [struct.unpack("<IIQQQQ", library[at : at + 40]) for at in range(table, table + size * count, size or 1)]
    for name, kind, flags, _, start, length in rows:
        if kind != _NO_BYTES:
            begin = rows[names][4] + name
            text = bytes(library[begin : begin + 64]).split(b"\0")[0].decode()
            yield Section(text, start, start + length, bool(flags & _LOADED))


def _containers(library: Bytes, section: Section) -> Iterator[Container]:
    """Yield the containers of a section, which begin at multiples of 8 bytes."""
    at = section.start
    while at + 16 <= section.end:
        magic, _, header, length = struct.unpack("<IHHQ", library[at : at + 16])
        if magic != _MAGIC:
            at += 8
            continue
        entries, where, end = [], at + header, at + header + length
        while where < end:
            kind, _, head, size = struct.unpack("<HHIQ", library[where : where + 16])
            (capability,) = struct.unpack("<I", library[where + 28 : where + 32])
            if head < 32 or where + head + size > end:
                raise ValueError(f"byte {where}: expected GPU code within {end - where} bytes, found {head} + {size}")
            entries.append(Code(kind, capability, where, where + head + size))
            where += head + size
        if entries:
            yield Container(at, header, entries)
        at = end


def _run_by(entries: Sequence[Code], capability: int) -> list[Code]:
    """Return the entries to keep for a GPU: machine code for its capability, else for its generation, else PTX.

    Entries that are neither machine code nor PTX are kept, too. If no entry fits, the smallest entry is kept, so that
    the driver still finds that nothing fits.
    """
    cubins = [code for code in entries if code.kind == _CUBIN]
    taken = (
        [code for code in cubins if code.capability == capability]
        or [code for code in cubins if capability // 10 * 10 <= code.capability < capability]
        or [code for code in entries if code.kind == _PTX and code.capability <= capability]
    )
    kept = [code for code in entries if code in taken or code.kind not in (_PTX, _CUBIN)]
    return kept or [min(entries, key=lambda code: code.end - code.start)]
