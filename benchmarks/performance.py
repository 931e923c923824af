"""Writes docs/performance.md from the result files: what was measured, what its limit is, and what has not been run.

    python benchmarks/performance.py

A figure is either a row, or, where every name reads "row: column", a cell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result import RESULTS, ROOT, shown

DOCUMENT = ROOT / "docs" / "performance.md"

HEADER = """# Performance

Drawn by `python benchmarks/performance.py` from benchmarks/results/; do not edit. Every table names the command that
made its figures, the commit, the machine and the date. Times depend on the machine: claims are ratios of things
measured side by side in one run. "not run" stands for what nobody has measured yet.
"""
NO_GPU = """
**Nothing has run on a GPU yet.** Every figure below is from a machine without one; what one GPU can show waits for
`benchmarks/gpu/run.sh`.
"""


@dataclass(frozen=True)
class Section:
    """One table: the result file of ``name``, the command that writes it, and the figures it must hold."""

    name: str
    title: str
    command: str
    about: str
    expected: tuple[tuple[str, str], ...] = ()
    """(figure, limit) of what the table shows while there is no result."""


SECTIONS = (
    Section(
        "parity",
        "Layouts",
        "python benchmarks/parity.py",
        "Largest difference of each layout from transformers + torch's AdamW in fp32: log-prob, entropy and loss "
        "absolute, gradient norm relative, gradient and what three steps moved relative to each tensor's norm.",
        (("log-prob", "≤ 1e-5"), ("gradient", "≤ 1e-4")),
    ),
    Section(
        "verify_sandbox",
        "Sandbox",
        "python benchmarks/verify_sandbox.py",
        "A trivial program that reads a number, each run in a fresh sandbox, beside bare Python in turn on one core.",
        (
            ("overhead per start, bubblewrap", "≤ 20 ms"),
            ("overhead per start, landlock", "≤ 20 ms"),
            ("tests per second and core, bubblewrap", "≥ 30 tests/s"),
            ("tests per second and core, landlock", "≥ 30 tests/s"),
        ),
    ),
    Section(
        "verify_soak",
        "Soak of the verifiers",
        "python benchmarks/verify_soak.py",
        "Mixed samples of math and code, 5% of them hostile, through the pool of local processes, in each tier of the "
        "sandbox; then what is left of them on the machine. The same samples through 1, 2 and 4 workers.",
        (
            ("bubblewrap: samples without a verdict", "≤ 0"),
            ("bubblewrap: hostile ones accepted", "≤ 0"),
            ("bubblewrap: processes, folders and cgroups left", "≤ 0"),
            ("bubblewrap: verifiers' memory, at 90% of the way over at 10%", "≤ 1.100"),
            ("the same verdicts through 1, 2 and 4 workers", "yes"),
        ),
    ),
    Section(
        "batching",
        "Batching",
        "python benchmarks/batching.py",
        "Packing 4,096 responses with lengths as in long-CoT rollouts (log-normal, mean 8K, cap 32K) for 32 "
        "data-parallel ranks, beside a Karmarkar–Karp partition by tokens.",
        (("padding", "≤ 2%"), ("slowest rank above the mean cost", "≤ 3%"), ("planning time", "≤ 1 s")),
    ),
    Section(
        "head_cpu",
        "Fused head on CPU",
        "python benchmarks/head_cpu.py",
        "Log-prob and entropy with gradients at N=4096, H=512, V=32768 in fp32, against the materialised logits.",
        (
            ("peak extra memory / materialised", "≤ 0.125"),
            ("time / materialised, forward and backward", "≤ 1.05"),
            ("time, one_pass / recompute", "≤ 0.85"),
        ),
    ),
    Section(
        "evaluation",
        "What an evaluation takes beyond the engines' time",
        "python benchmarks/evaluation.py",
        "The same requests on the same engines, by turns: given to them at once and harvested (bare), and evaluated: "
        "all that the command does from the moment when its engines are up. Short: 2,048 requests, long: 10,240. The "
        "last row is of whole evaluations, against starting the engines, sampling bare and closing them.",
        (
            ("evaluation / bare, short", "≤ 1.05"),
            ("evaluation / bare, long", "≤ 1.05"),
            ("evaluation / bare, long, with the engines' start", "≤ 1.05"),
        ),
    ),
    Section(
        "report",
        "The page of a run",
        "python benchmarks/report.py",
        "12,288 responses of 2,000 tokens in the mean, 200 of them in full, and 1,000 steps of 90 metrics, as "
        "`or1 report` draws them; seen in headless Chromium, each time a fresh one.",
        (("first contentful paint", "≤ 3 s"), ("page", "≤ 50 MB")),
    ),
    Section(
        "verify_peers",
        "Code verifier beside others",
        "python benchmarks/verify.py --livecodebench CHECKOUT --verl CHECKOUT",
        "76 honest and 32 dishonest hand-written submissions, the same to LiveCodeBench's own harness and verl's "
        "prime_code, as far as these have the kind; every disagreement is listed in the result file. Then 30 trivial "
        "tests of one submission, one submission at a time: ours starts a sandbox per stdin test, theirs run all tests "
        "in one unconfined process.",
        (
            ("ours: honest as read", "100%"),
            ("ours: hacks accepted", "0"),
            ("ours: stdin tests per second", "≥ 30"),
        ),
    ),
    Section(
        "checkpoint",
        "Asynchronous checkpoints",
        "python benchmarks/checkpoint.py",
        "How long a save holds the training loop, against a plain memory copy of the same state.",
        (("loop held / memory copy of the state", "≤ 1.5"),),
    ),
    Section(
        "convert",
        "Converters",
        "python benchmarks/convert.py --scratch FOLDER",
        "HF folder to Megatron checkpoint and back, whole commands from start to exit, beside cp -r and fsync of the "
        "same bytes. Peak of RssAnon, summed over processes.",
        (
            ("to Megatron, speed / cp -r with fsync", "≥ 0.600"),
            ("to HF, speed / cp -r with fsync", "≥ 0.600"),
            ("peak anonymous memory", "≤ 2 GiB"),
        ),
    ),
    Section(
        "handoff",
        "Handoff on CPU",
        "python benchmarks/handoff.py",
        "Slices from every trainer rank, over gloo and over shared memory, against gathering on rank 0 and "
        "broadcasting (`gloo`): 100M parameters in bf16, TP2 x PP2 to two engines. Bytes as the transports count. The "
        "plain copy sends the same messages through the same transport to bare processes.",
        (("slices, times as fast as gloo, to TP1 engines", "≥ 1.3"), ("the same to TP2 engines", "≥ 2")),
    ),
    Section(
        "certificate",
        "What proving a handoff costs",
        "python benchmarks/certificate.py",
        "Handoffs of 100M parameters in bf16, TP2 to two engines, by turns with and without checksums; the probe of "
        "the quickstart's second stage.",
        (("checksums over handoff", "≤ 10%"), ("probe over step", "≤ 1%")),
    ),
    Section(
        "handoff_forecast",
        "Handoffs of large models on paper",
        "python benchmarks/handoff_forecast.py",
        "Nothing is sent: the planner's bytes over the busiest rank's link, at 400 Gb/s and at NVLink's 450 GB/s in "
        "each direction; packing, checksums and loading come on top. A row is a trainer and the engines it feeds. "
        "Published figures are others' measurements on other clusters, for the order of magnitude: 32B dense, a 30B "
        "mixture shard to shard, and vLLM's sharded backend at 235B.",
    ),
    Section(
        "data_pipeline",
        "The data pipeline",
        "python benchmarks/data_pipeline.py --scratch FOLDER",
        "The steps that need neither a model, a verifier nor the sandbox, each in a process of its own on one thread: "
        "rows per second of CPU time and peak resident memory, on synthetic rows of NuminaMath-1.5's columns.",
        (("each step, rows per CPU second", "≥ 5,000"), ("each step, peak memory at 1M rows", "≤ 2 GiB")),
    ),
    Section(
        "data_quality",
        "Near-duplicates",
        "python benchmarks/data_quality.py",
        "Variants of the example's problems, half of them the same problem in other words, half another that looks "
        "alike; a variant counts as found when it is taken for a copy of its own base.",
        (("recall", "≥ 0.950"), ("precision", "≥ 0.950")),
    ),
    Section(
        "quickstart",
        "The quickstart",
        "python benchmarks/quickstart.py --seeds 1 2 3",
        "Whole runs of examples/quickstart/run.sh; README.md says what they show.",
    ),
    Section(
        "gpu_head",
        "Fused head on one GPU",
        "benchmarks/gpu/run.sh",
        "N=32768, H=5120, V=152064 in bf16. The floor is the matrix products alone at the rate that one such product "
        "reaches on the same GPU: 8NHV for recompute, 6NHV for one_pass.",
        (("recompute, floor / time", "≥ 85%"), ("time, one_pass / recompute", "≤ 0.85")),
    ),
    Section(
        "gpu_handoff",
        "Handoff transports on GPUs",
        "benchmarks/gpu/run.sh",
        "Random bf16 tensors from trainer ranks to as many engine ranks, packed, sealed, compared and copied out, "
        "without vLLM; beside one copy of the same bytes on the device.",
        (("cuda_ipc", ""), ("nccl", ""), ("nccl+cuda_ipc", "")),
    ),
    Section(
        "gpu_policy",
        "A Megatron policy on one GPU",
        "benchmarks/gpu/run.sh",
        "Forward, backward and optimizer step of random Qwen2 models in bf16 with fp32 master weights and our own "
        "layers. MFU counts 6 operations per weight of a matrix product and token, and causal attention; nothing that "
        "is computed again.",
        (("tokens per second, MFU, peak memory", ""),),
    ),
    Section(
        "gpu_offload",
        "Offload on one GPU",
        "benchmarks/gpu/run.sh",
        "Parameters and optimizer state to the host and back, against a plain copy of as many bytes between "
        "page-locked memory and the GPU.",
        (("each way / plain copy", "≥ 85%"), ("bit-exact", "yes"), ("freed on the device / held", "≥ 98%")),
    ),
    Section(
        "math_verifier",
        "The math verifier",
        "python benchmarks/math_verifier.py --suite DIR",
        "Right answers refused and wrong ones accepted on the labelled pairs of tests/data/math_pairs (notations known "
        "to be hard, many times everyday rates; the frozen third was not tuned on) and on Math-Verify's own tests with "
        "its authors' labels, beside Math-Verify alone in the recipe's way and two rules written from their "
        "descriptions; verdicts per second of CPU time, worker process included.",
        (
            ("frozen third, refused beside Math-Verify", "≤ 0.75"),
            ("frozen third, accepted beside Math-Verify", "≤ 1/3"),
            ("verdicts/s/core", "≥ 400"),
        ),
    ),
)


def document(results: Path) -> str:
    """The whole of docs/performance.md, from the result files in a folder."""
    found = {section.name: load(results / f"{section.name}.json") for section in SECTIONS}
    on_gpu = any(result is not None for name, result in found.items() if name.startswith("gpu_"))
    parts = [HEADER.rstrip("\n"), "" if on_gpu else NO_GPU.strip("\n")]
    parts += [part for section in SECTIONS for part in section_lines(section, found[section.name])]
    return "\n\n".join(part for part in parts if part) + "\n"


def load(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def section_lines(section: Section, result: Mapping[str, Any] | None) -> list[str]:
    head = [f"## {section.title}", section.about]
    if result is None:
        rows = [(name, "not run", limit, "") for name, limit in section.expected]
        return [*head, table(("figure", "measured", "limit", "met"), rows), f"Command: `{section.command}`."]
    return [*head, figures_table(result["figures"]), provenance(result)]


def provenance(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    settings = "; ".join(f"{name} {setting(value)}" for name, value in result["settings"].items())
    return (
        f"Command: `{result['command']}` at commit {result['commit']}, {result['date'][:10]}, on {result['device']}; "
        f"{versions}." + (f" Settings: {settings}." if settings else "")
    )


def setting(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(setting(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def figures_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    names = [name.partition(": ") for name in figures]
    if not all(colon for _, colon, _ in names):
        rows = [(name, *cells(entry)) for name, entry in figures.items()]
        return table(("figure", "measured", "limit", "met"), rows)
    columns = list(dict.fromkeys(column for _, _, column in names))
    lines = []
    for row in dict.fromkeys(row for row, _, _ in names):
        lines.append((row, *(cell(figures.get(f"{row}: {column}")) for column in columns)))
    return table(("", *columns), lines)


def cells(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    met = "" if "met" not in entry else "yes" if entry["met"] else "**no**"
    return shown(entry["value"], entry["unit"]), entry.get("limit", ""), met


def cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    measured, limit, met = cells(entry)
    return f"{measured} ({limit}: {met})" if limit else measured


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    DOCUMENT.write_text(document(RESULTS))
    print(DOCUMENT.relative_to(ROOT))


if __name__ == "__main__":
    main()
