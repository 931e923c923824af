"""The recipes, parallel layouts, model shapes and hardware files in the package, by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from or1_megatron.config.base import ConfigError
from or1_megatron.config.keys import did_you_mean

CONFIGS: Final = Path(__file__).parents[1] / "configs"
Kind = Literal["recipe", "layout", "shape", "hardware"]
_PATTERNS: Final[dict[Kind, str]] = {
    "recipe": "recipes/**/*.yaml",
    "layout": "layouts/*.yaml",
    "shape": "models/*/",
    "hardware": "hardware/*.yaml",
}


def named(kind: Kind) -> dict[str, Path]:
    """Return, by name (such as ``released/or1_7b``), the path of each packaged file of a kind; shapes are folders."""
    top = CONFIGS / _PATTERNS[kind].partition("/")[0]
    return {str(path.relative_to(top).with_suffix("")): path for path in sorted(CONFIGS.glob(_PATTERNS[kind]))}


def find(kind: Kind, given: Path) -> Path:
    """Return ``given`` if it is a file (for the kind "shape", a folder), else the packaged file or folder of that name.

    Raises:
        ConfigError: neither exists; the message gives the nearest known name.
    """
    known = named(kind)
    if given.is_dir() if kind == "shape" else given.is_file():
        return given
    if str(given) in known:
        return known[str(given)]
    raise ConfigError(
        f"{given}: no such {'folder' if kind == 'shape' else 'file'}, and no {kind} of that name"
        + (did_you_mean(str(given), known) or f"; there are: {', '.join(known)}")
    )


def shape_like(model: Path) -> Path | None:
    """Return the shape named like a model's folder: deepseek_r1_distill_qwen_7b for DeepSeek-R1-Distill-Qwen-7B."""
    return named("shape").get(re.sub(r"[^a-z0-9]+", "_", model.name.lower()))


def summary(path: Path) -> str:
    """Return the first sentence of the comment that a recipe or layout begins with."""
    comment = re.match(r"(?:#.*\n)*", path.read_text())
    text = " ".join(line.lstrip("# ") for line in comment[0].splitlines()) if comment else ""
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
