from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import rank_server  # noqa: F401
from tiny_models import FAMILIES, make_tiny


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    return _make_model


def _make_model(folder: Path, architecture: str, **changes: Any) -> Path:
    """Make a random model of a family in about three files, with the files beside weights."""
    name = next(name for name, (prefix, _) in FAMILIES.items() if architecture == f"{prefix}ForCausalLM")
    make_tiny(folder, name, "bfloat16", "150KB", **changes)
    (folder / "tokenizer.json").write_text(json.dumps({"of": architecture}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "README.md").write_text("The base model's own card.")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder
