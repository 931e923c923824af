"""What the environment of a run gives its programs: a folder for sockets, a home, open files."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path
from typing import Final

from or1_verify.errors import UserError

_SOCKET_FOLDER_BYTES: Final = 36
"""A socket's path has 107 bytes at most, of which Ray's names take up to 70."""
_OPEN_FILES: Final = 1024
"""The least that a run needs in one process."""
_MANY_FILES: Final = 1 << 16


def make_usable() -> list[str]:
    """Change TMPDIR, HOME and the limit on open files, for this process and all that it starts, where a run could not
    live with them; return a line for each that was changed and that a user may miss.

    Raises:
        UserError: they cannot be changed as needed, /dev/shm cannot be written, or torch's allocator is set to what no
            handoff can live with.
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
