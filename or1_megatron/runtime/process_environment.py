"""Checks and repairs the environment of a run: temporary folder, home, /dev/shm, limit on open files."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path
from typing import Final

from or1_verify.errors import UserError

_SOCKET_FOLDER_BYTES: Final = 36
"""Longest path of the temporary folder. A socket's path has at most 107 bytes; Ray needs up to 70 below the folder."""
_OPEN_FILES: Final = 1024
"""The number of open files that a process of a run needs at least."""
_MANY_FILES: Final = 1 << 16


def make_usable() -> list[str]:
    """Unset a too long RAY_TMPDIR or TMPDIR, replace a HOME that cannot be written, and raise the limit on open files.

    The changes are for this process and its children. Returns a line for the user about each changed folder.

    Raises:
        UserError: too few files can be opened, /dev/shm cannot be written, or PYTORCH_CUDA_ALLOC_CONF switches on
            expandable_segments, with which no handoff between GPU processes works.
    """
    said = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise UserError(
                f"{name}={os.environ[name]}: a handoff shares GPU memory between processes, which expandable_segments "
                "rules out: take it out"
            )
    if not os.access("/dev/shm", os.W_OK):
        raise UserError("/dev/shm cannot be written, and the processes of a run meet there: mount it for writing")
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if len(os.environ.get(name, "").encode()) > _SOCKET_FOLDER_BYTES:
            long = os.environ.pop(name)
            tempfile.tempdir = None
            said.append(f"{name}={long} is too long for the paths of sockets; {tempfile.gettempdir()} is used")
    home = Path("~").expanduser()
    if not (home.is_dir() and os.access(home, os.W_OK)):
        os.environ["HOME"] = tempfile.mkdtemp(prefix="or1-home-")
        said.append(f"the home {home} cannot be written; caches go to {os.environ['HOME']}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else _MANY_FILES
    if most < _OPEN_FILES:
        raise UserError(f"a process may open {most} files here, and a run needs {_OPEN_FILES}: raise ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, _MANY_FILES)), hard))
    return said
