"""What is read of a run's configuration, which another version may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from or1_megatron.runtime.run_folder import RunFolder


def read_config(folder: RunFolder) -> Mapping[str, Any]:
    """Return the configuration of a run, as it was written; empty where the folder has none."""
    return (yaml.safe_load(folder.config.read_text()) or {}) if folder.config.is_file() else {}


def entropy_target(config: Mapping[str, Any]) -> float | None:
    """Return the target of a run's entropy control, from ``read_config``; None if it has none."""
    entropy = config.get("algorithm", {}).get("entropy", {})
    return float(entropy["target"]) if entropy.get("mode") == "adaptive" else None
