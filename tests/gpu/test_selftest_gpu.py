"""The checks of ``or1 selftest`` on a GPU: what one shows without vLLM and Ray, and with them what they can.

Not proven here: speeds (a check does not fail on them).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from or1_megatron.selftest.registry import CHECKS

pytestmark = pytest.mark.gpu
NAMES = [check.name for check in CHECKS if not check.only_long]


@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "or1_megatron.commands.app", "selftest", name, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (outcome,) = json.loads((tmp_path / "selftest.json").read_text())["outcomes"]
    if outcome["status"] == "not possible":
        pytest.skip(outcome["reason"])
    assert done.returncode == 0, done.stdout[-4000:]
