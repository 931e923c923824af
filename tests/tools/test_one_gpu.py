"""Blanking the code of other GPUs in libraries: built ones of known content, and torch's, read by NVIDIA's cuobjdump.

Not shown: that a driver takes a library that was blanked.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import triton

from tools.one_gpu import blank_other_gpus

PTX, CUBIN, OTHER = 1, 2, 64
Entry = tuple[int, int, bytes]
"""Kind, compute capability, and the code, a multiple of 8 bytes."""


def container(entries: Sequence[Entry]) -> bytes:
    """Build a fat binary, whose entries have headers of 64 bytes."""
    body = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 1, 64, len(code), capability) + code for kind, capability, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*sections: tuple[str, int, bytes]) -> bytearray:
    """Build an ELF file of sections (name, flags, bytes), without anything that a loader needs."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _, _ in sections) + b".names\0"
    data, table = bytearray(64), b""
    for name, flags, content in (*sections, (".names", 0, names)):
        table += struct.pack("<IIQQQQ24x", names.index(name.encode() + b"\0"), 1, flags, 0, len(data), len(content))
        data += content
    data[:6] = b"\x7fELF\x02\x01"
    data[0x28:0x30] = struct.pack("<Q", len(data))
    data[0x3A:0x40] = struct.pack("<HHH", 64, len(sections) + 1, len(sections))
    return data + table


def kept(entries: Sequence[Entry], capability: int) -> list[tuple[int, int]]:
    """Blank a library with these entries, and return those whose code is still there; the others are zeros."""
    data = library((".text", 2, b"\x90" * 64), (".nv_fatbin", 2, bytes(8) + container(entries)))
    whole = bytes(data)
    before, after = blank_other_gpus(data, capability)
    assert len(data) == len(whole) and before == sum(len(code) for _, _, code in entries)
    there = [(kind, number) for kind, number, code in entries if code in data]
    assert after == sum(len(code) for kind, number, code in entries if (kind, number) in there)
    for kind, number, code in entries:
        expected = code if (kind, number) in there else bytes(len(code))
        at = whole.index(code)
        assert data[at : at + len(code)] == expected
        whole = whole[:at] + expected + whole[at + len(code) :]
    assert data == whole  # headers, offsets and the processor's code are untouched
    return there


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([(CUBIN, 80), (CUBIN, 90), (CUBIN, 100), (PTX, 120)], [(CUBIN, 90)]),
        ([(CUBIN, 75), (CUBIN, 80), (PTX, 80), (PTX, 100)], [(PTX, 80)]),
        ([(PTX, 80), (OTHER, 100)], [(PTX, 80), (OTHER, 100)]),
        ([(CUBIN, 100)], []),
    ],
    ids=["its own machine code", "PTX that it can compile", "what is no code of a GPU stays", "nothing for it"],
)
def test_what_the_driver_would_take_stays(given: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    entries = [(kind, number, bytes([kind, number]) * 32) for kind, number in given]
    assert kept(entries, 90) == left


def test_machine_code_of_its_generation_stays_where_it_has_none_of_its_own() -> None:
    entries = [(CUBIN, number, bytes([number]) * 8) for number in (75, 80, 87, 90)]
    assert kept(entries, 86) == [(CUBIN, 80)]


def test_tables_for_debuggers_go_and_those_for_the_loader_stay() -> None:
    data = library((".dynsym", 2, b"loader--"), (".symtab", 0, b"debugger"), (".strtab", 2, b"loaded--"))
    assert blank_other_gpus(data, 90) == (0, 0)
    assert b"loader--" in data and b"loaded--" in data and b"debugger" not in data


def test_a_file_that_is_cut_short_is_named_and_stays_as_it_is() -> None:
    data = library((".nv_fatbin", 2, container([(CUBIN, 80, bytes([1]) * 64)])[:-32] + struct.pack("<QQ", 1, 1) * 2))
    struct.pack_into("<Q", data, 64 + 16 + 8, 1 << 20)  # the entry says that it is longer than its container
    whole = bytes(data)
    with pytest.raises(ValueError, match="expected GPU code within 128 bytes, found 64 \\+ 1048576"):
        blank_other_gpus(data, 90)
    assert data == whole


def test_of_a_real_library_nvidias_tool_reads_one_gpus_code(tmp_path: Path) -> None:
    """cuobjdump finds the same machine code for 9.0 before and after, to the byte, and none for another GPU."""
    real = Path(torch.__file__).parent / "lib/libtorch_nvshmem.so"
    if not real.exists():
        pytest.skip("this torch has no CUDA libraries")
    data = bytearray(real.read_bytes())
    before, after = blank_other_gpus(data, 90)
    assert 0 < after < before / 3
    found = []
    for name, content in (("whole", real.read_bytes()), ("blanked", bytes(data))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "library.so").write_bytes(content)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        subprocess.run([tool, "-xelf", "all", "library.so"], cwd=folder, capture_output=True, check=False)
        cubins = [path for path in folder.glob("*.cubin") if path.read_bytes()[:4] == b"\x7fELF"]
        found.append({path.name.split(".", 2)[2]: path.read_bytes() for path in cubins})
    assert len(found[0]) > 3 and found[1] == {"sm_90.cubin": found[0]["sm_90.cubin"]}
