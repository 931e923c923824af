"""Programs that run inside a sandbox. It gets their text; we never import them. They need only the standard library.

Each finds ``codec.py`` beside it, which it imports.
"""

from __future__ import annotations

from pathlib import Path

from or1_verify.sandbox.program import Program

_FOLDER = Path(__file__).parent
_CODEC = _FOLDER.parent.joinpath("codec.py").read_bytes()


def own_program(name: str) -> Program:
    """Return one of this folder's programs, such as "call_server"."""
    source = _FOLDER.joinpath(f"{name}.py").read_bytes()
    return Program({"main.py": source, "codec.py": _CODEC}, ("{python}", "{box}/main.py"))
