"""Our own programs that run inside a sandbox. The sandbox gets their text, so no module here imports them.

They need only the standard library and ``codec.py``, which the sandbox holds too.
"""

from __future__ import annotations

from pathlib import Path

from or1_verify.sandbox.program import Program

_FOLDER = Path(__file__).parent
_CODEC = _FOLDER.parent.joinpath("codec.py").read_bytes()


def own_program(name: str) -> Program:
    """Return the sandbox program made of one of this folder's files, such as "call_server"."""
    source = _FOLDER.joinpath(f"{name}.py").read_bytes()
    return Program({"main.py": source, "codec.py": _CODEC}, ("{python}", "{box}/main.py"))
