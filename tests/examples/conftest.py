"""The examples are scripts, not a package: their folders go on the path, as when they are run."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "quickstart"))
