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

from tools.strip_gpu_code import blank_other_gpus

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


@pytest.mark.parametrize(
    ("given", "capability", "left"),
    [
        ([(CUBIN, 80), (CUBIN, 90), (CUBIN, 90), (CUBIN, 100), (PTX, 120)], 90, [1, 2]),  # machine code of its own
        ([(CUBIN, 75), (CUBIN, 80), (CUBIN, 87), (CUBIN, 90)], 86, [1]),  # of its generation
        ([(CUBIN, 75), (CUBIN, 80), (PTX, 80), (PTX, 100)], 90, [2]),  # PTX that it can compile
        ([(PTX, 80), (CUBIN, 100), (OTHER, 100)], 90, [0, 2]),  # what is no code stays
        ([(CUBIN, 120), (CUBIN, 100)], 90, [1]),  # nothing fits: the smallest
    ],
)
def test_a_container_ends_after_what_the_driver_would_take(
    given: list[tuple[int, int]], capability: int, left: list[int]
) -> None:
    """The library is that which would have been built with these entries alone, with zeros behind them."""
    entries = [(kind, number, bytes([1 + index]) * (80 - 8 * index)) for index, (kind, number) in enumerate(given)]
    other, behind = container([(CUBIN, capability, b"the only" * 4)]), (".text", 2, b"\x90" * 64)
    whole, kept = container(entries), container([entries[index] for index in left])
    tables = (".symtab", 2, b"loaded--"), (".strtab", 0, b"debugger")
    data = library(behind, (".nv_fatbin", 2, bytes(8) + whole + other), *tables)
    before, after = blank_other_gpus(data, capability)
    padded = kept + bytes(len(whole) - len(kept))
    assert data == library(behind, (".nv_fatbin", 2, bytes(8) + padded + other), tables[0], (".strtab", 0, bytes(8)))
    assert (before, after) == (len(whole) + len(other) - 32, len(kept) + len(other) - 32)


def test_a_container_that_is_cut_short_is_refused_and_nothing_changes() -> None:
    data = library((".nv_fatbin", 2, container([(CUBIN, 80, bytes(64))])))
    struct.pack_into("<Q", data, 64 + 16 + 8, 1 << 20)  # the entry is longer than its container
    whole = bytes(data)
    with pytest.raises(ValueError, match="within 128 bytes, found 64 \\+ 1048576"):
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
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for name, content in (("whole", real.read_bytes()), ("blanked", bytes(data))):
        (tmp_path / f"{name}.so").write_bytes(content)
        subprocess.run([tool, "-xelf", "all", f"{name}.so"], cwd=tmp_path, capture_output=True, check=True)
    (same,), (found,) = tmp_path.glob("whole.*.sm_90.cubin"), tmp_path.glob("blanked.*.cubin")
    assert ".sm_90." in found.name and found.read_bytes() == same.read_bytes()
