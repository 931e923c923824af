"""Print the project's size and its limits: lines of Python of packages, tests and lab, words of docs.

    python tools/budget.py

Only files that git tracks count, without generated pages (``GENERATED``) and results.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).parents[1]
GENERATED: Final = ("schemas", "config", "files")
BUDGET: Final = {
    "packages": (("or1_megatron/*.py", "or1_verify/*.py"), "lines", 46_000 + 2_600),
    "tests": (("tests/*.py",), "lines", 32_000),
    "lab": (("lab/*.py",), "lines", 3_500),
    "docs": (("README.md", "docs/*.md", *(f":!docs/{page}.md" for page in GENERATED)), "words", 40_000),
}
"""For each room: its files, the unit that is counted, and the limit. The limit of the packages is 46,000 lines, plus
2,600 for the newer model families, router replay and LoRA."""
TRAINER_STARTS: Final = ("commands.train", "trainer.run", "rollout.worker", "handoff.vllm.receiver")
TRAINER_LIMIT: Final = 30_000
"""The modules by which a run's processes start, and the limit of lines of ``or1_megatron`` that these can import."""


def tracked(patterns: tuple[str, ...]) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, check=True, capture_output=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def trainer() -> list[Path]:
    """Return the files of ``or1_megatron`` that processes of ``or1 train`` import, also inside of functions."""
    graph = grimp.build_graph("or1_megatron", "or1_verify", cache_dir=None)
    starts = {f"or1_megatron.{name}" for name in TRAINER_STARTS}
    # Objectives are imported by their names in the configuration.
    starts |= graph.find_descendants("or1_megatron.rl.objectives")
    reached = starts.union(*(graph.find_upstream_modules(name) for name in starts))
    reached |= {name.rpartition(".")[0] for name in reached}
    return [file for file in tracked(("or1_megatron/*.py",)) if module_name(file) in reached]


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def main() -> None:
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in trainer())
    over = f", {lines - TRAINER_LIMIT:,} over" if lines > TRAINER_LIMIT else ""
    print(f"trainer: {lines:,} lines of {TRAINER_LIMIT:,}{over}, part of the packages")
    for room, (patterns, unit, most) in BUDGET.items():
        texts = [path.read_text(encoding="utf-8") for path in tracked(patterns)]
        count = sum(len(text.splitlines() if unit == "lines" else text.split()) for text in texts)
        over = f", {count - most:,} over" if count > most else ""
        print(f"{room}: {count:,} {unit} of {most:,}{over}")


if __name__ == "__main__":
    main()
