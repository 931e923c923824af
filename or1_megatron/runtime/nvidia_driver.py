"""Checks that the NVIDIA driver is new enough for the CUDA of the installed torch. Does not import torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Final

from or1_verify.errors import UserError

_FIRST_DRIVER: Final = {12: 525, 13: 580}
"""The first driver series of each CUDA, from the table in NVIDIA's CUDA release notes."""


class DriverTooOld(UserError):
    """The NVIDIA driver is older than the CUDA that torch was built for."""


def check_driver() -> None:
    """Refuse a machine whose driver is too old for torch, because torch would then silently train on CPU.

    Raises:
        DriverTooOld: the message says what is installed and what to do.
    """
    if problem := driver_problem():
        raise DriverTooOld(problem)


def driver_problem(wanted: tuple[int, int] | None = None) -> str:
    """Return why the driver cannot run torch for CUDA ``wanted`` (default: the installed torch's CUDA).

    The text is empty if the driver can run torch, if there is no driver, and if torch has no CUDA. The version comes
    from the driver's library, not its kernel module: NVIDIA's forward compatibility adds a newer library to an older
    module.
    """
    wanted, offered = wanted or torch_cuda(), driver_cuda()
    if wanted is None or offered is None or offered[0] >= wanted[0]:
        return ""
    series = f" of series {_FIRST_DRIVER[wanted[0]]} or newer" if wanted[0] in _FIRST_DRIVER else ""
    return (
        f"the NVIDIA driver offers CUDA {offered[0]}.{offered[1]}, and torch is built for CUDA "
        f"{wanted[0]}.{wanted[1]}; install a driver{series}, or on data-centre GPUs NVIDIA's package "
        f"cuda-compat-{wanted[0]}-{wanted[1]}; or train on CPU with `make setup`"
    )


def torch_cuda() -> tuple[int, int] | None:
    """Return the CUDA version that the installed torch's version.py names; None without torch or CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    version = Path(next(iter(spec.submodule_search_locations)), "version.py")
    text = version.read_text() if version.exists() else ""
    built = re.search(r"^cuda\b[^=]*=\s*'(\d+)\.(\d+)'", text, re.MULTILINE)
    return (int(built[1]), int(built[2])) if built else None


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver's library offers; None where there is no driver."""
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10
