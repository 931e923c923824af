"""The checks of ``or1 selftest`` on a GPU: those that it can make without vLLM and Ray, and with them the others.

Not proven here: speeds (a check does not fail on them).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from or1_megatron.selftest.known_checks import chosen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [check.name for check in chosen(())])
def test_check(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "or1_megatron.commands.app", "selftest", name, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (outcome,) = json.loads((tmp_path / "selftest.json").read_text())["outcomes"]
    if outcome["status"] == "not possible":
        pytest.skip(outcome["reason"])
    assert done.returncode == 0, done.stdout[-4000:]
