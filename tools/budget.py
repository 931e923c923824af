"""Print how large the project is beside its budget: lines of Python by room, words of docs.

    python tools/budget.py

Counted are the files that git tracks, without generated reference (``GENERATED``) and results.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
GENERATED: Final = ("schemas", "config", "files")
BUDGET: Final = {
    "packages": (("or1_megatron/*.py", "or1_verify/*.py"), "lines", 46_000 + 2_600),
    "tests": (("tests/*.py",), "lines", 32_000),
    "lab": (("lab/*.py",), "lines", 3_500),
    "docs": (("README.md", "docs/*.md", *(f":!docs/{page}.md" for page in GENERATED)), "words", 40_000),
}
"""The files of each room, what is counted, and the largest number that it may reach; for the packages 46,000, and 2,600
more for the newer model families, router replay and LoRA."""


def tracked(patterns: tuple[str, ...]) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, check=True, capture_output=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def main() -> None:
    for room, (patterns, unit, most) in BUDGET.items():
        texts = [path.read_text(encoding="utf-8") for path in tracked(patterns)]
        count = sum(len(text.splitlines() if unit == "lines" else text.split()) for text in texts)
        over = f", {count - most:,} over" if count > most else ""
        print(f"{room}: {count:,} {unit} of {most:,}{over}")


if __name__ == "__main__":
    main()
