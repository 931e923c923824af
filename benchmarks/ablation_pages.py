"""Holm's correction of the comparisons on ablations' pages that were written without it, from their rounded figures.

    python benchmarks/ablation_pages.py docs/ablations/*.md

A page says the mean difference of the seeds and half of its 95% interval, so t is their ratio times Student's quantile.
A figure that is rounded to a few thousandths gives t to some tenths: what lies near its level may go either way.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from or1_megatron.ablate.statistics import LEVEL, holm, quantile, tail

SEEDS = 3
_ROW = re.compile(
    r"^\| (?P<says>.+?) \| `(?P<metric>\S+)`, [a-z ]+ \| (?P<arms>.+ > .+?)(?: − (?P<margin>[\d.]+))? \| "
    r"(?P<mean>-?[\d.]+) ± (?P<half>[\d.]+) \| \*\*(?P<seen>[a-z ]+)\*\* \|$",
    re.MULTILINE,
)


def corrected(page: str) -> list[tuple[str, float, float, str, str]]:
    """Return (comparison, p, Holm's level, verdict without the correction, verdict with it) of a page's comparisons."""
    rows = list(_ROW.finditer(page))
    distances = [float(row["mean"]) + float(row["margin"] or 0.0) for row in rows]
    widths = [float(row["half"]) / quantile(LEVEL, SEEDS - 1) for row in rows]
    p_values = [tail(abs(far) / width, SEEDS - 1) for far, width in zip(distances, widths, strict=True)]
    found = []
    for row, far, p, level in zip(rows, distances, p_values, holm(p_values), strict=True):
        verdict = "not resolved" if p > level else "as claimed" if far > 0 else "the opposite"
        found.append((f"{row['says']}: {row['arms']}, {row['metric']}", p, level, row["seen"], verdict))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    for path in parser.parse_args(arguments).pages:
        found = corrected(path.read_text())
        print(f"{path.stem}: {len(found)} comparisons")
        for says, p, level, alone, verdict in found:
            if alone != "not resolved" or verdict != "not resolved":
                print(f"  {says}: p {p:.4f}, level {level:.4f}: {alone} alone, {verdict} corrected")


if __name__ == "__main__":
    main()
