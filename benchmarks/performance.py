"""Writes docs/performance.md from the result files: what was measured, its limit, and what has not been run.

    python benchmarks/performance.py

The figures of GPUs are in one file, gpu.json, by check of ``or1 selftest``.

A figure is a row of its table or, if all names have the form "row: column", a cell.
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

Written by `python benchmarks/performance.py` from benchmarks/results/; do not edit. Every table names the command that
measured its figures, the commit, the machine and the date. Times depend on the machine, so claims are ratios of two
times that were measured side by side in one run. "not run" means that nobody has measured the figure yet.
"""
NO_GPU = """
Every figure below is from a machine without a GPU ([gpu_status.md](gpu_status.md)); `benchmarks/gpu/run.sh` measures
what one GPU can show.
"""


@dataclass(frozen=True)
class Section:
    """One table: the result file of ``name``, the command that writes it, and the figures it must hold."""

    name: str
    title: str
    command: str
    about: str
    expected: tuple[tuple[str, str], ...] = ()
    """[(figure, limit)] that the table lists while there is no result."""


SECTIONS = (
    Section(
        "parity",
        "Layouts",
        "python benchmarks/parity.py",
        "The largest difference of each layout from transformers with torch's AdamW in fp32. Log-prob, entropy and "
        "loss: absolute; gradient norm: relative; gradient, and the change of the parameters in three steps: relative "
        "to each tensor's norm.",
        (("log-prob", "≤ 1e-5"), ("gradient", "≤ 1e-4")),
    ),
    Section(
        "verify_sandbox",
        "Sandbox",
        "python benchmarks/verify_sandbox.py",
        "A trivial program that reads a number, each time in a fresh sandbox, in turn with bare Python on one core. "
        "The rates follow the machine: commit 28ca5cb reached 39.5 tests/s in bubblewrap where bare Python started in "
        "8.2 ms, and 24.9 and 25.1 on that of this table. Commit 341fdf4, which ran .pth files and entered the cgroup "
        "after Python's start, reached 28.5 and 26.6 by turns with 36.7 and 34.6 today: 1.3 times as many.",
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
        "Mixed samples of math and code, 5% of them hostile, verified by the pool of local processes in each tier of "
        "the sandbox; then what they left on the machine. The same samples with 1, 2 and 4 workers.",
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
        "data-parallel ranks, compared with a Karmarkar–Karp partition by tokens.",
        (("padding", "≤ 2%"), ("slowest rank above the mean cost", "≤ 3%"), ("planning time", "≤ 1 s")),
    ),
    Section(
        "head_cpu",
        "Fused head on CPU",
        "python benchmarks/head_cpu.py",
        "Log-prob and entropy with gradients at N=4096, H=512, V=32768 in fp32, compared with materialised logits.",
        (
            ("peak extra memory / materialised", "≤ 0.125"),
            ("time / materialised, forward and backward", "≤ 1.05"),
            ("time, one_pass / recompute", "≤ 0.85"),
        ),
    ),
    Section(
        "cubins",
        "Triton kernels compiled for Hopper",
        "python benchmarks/cubins.py",
        "Every Triton kernel of the head as its launcher calls it, compiled for sm_90 on a machine without a GPU: what "
        "a thread and a program take, and the widest load. 64 registers let an SM hold four programs of 256 threads. "
        "The head has run on an H100 (below).\n\n"
        "The epilogues have no stream and logits buffer of their own. Two buffers within the same budget halve the "
        "tile, and by kernels/estimate.py that costs what they could hide. With "
        "32,768 tokens of a 32B model (H 5,120, V 152,064) and every epilogue hidden behind a product, recompute "
        "would take 291 instead of 293 ms on an H100 and 284 instead of 283 ms on an H200, one pass 238 instead of "
        "229 ms and 225 instead of 219 ms (`pytest tests/kernels/test_head_estimate.py -k second`). Two buffers of "
        "the present size, 554 MB in all, could hide 16.5 ms of the 293 ms: 5.6% of a head that has 2.4% of a 32B "
        "model's weights (a 7B: 7.9% of 7.2%), so 0.1% to 0.6% of an update's arithmetic. Part of it would remain in "
        "sight: a Hopper product with tiles of 128 x 256 takes nearly all registers of an SM (CUTLASS's cooperative "
        "kernel 64,512 of 65,536), so an epilogue takes SMs from the product rather than running beside it, and with "
        "CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron wants it, kernels of all streams start in the order of their "
        "launches. For that, each backward pass would depend on an order of waits that no CPU runs.",
    ),
    Section(
        "evaluation",
        "The overhead of an evaluation",
        "python benchmarks/evaluation.py",
        "The same requests on the same engines, in turn: submitted at once and collected (bare), and evaluated, which "
        "is all that the command does once its engines are up. Short: 2,048 requests, long: 10,240. The last row "
        "compares whole evaluations with starting the engines, bare sampling and closing them.",
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
        "12,288 responses of 2,000 tokens on average, 200 of them in full, and 1,000 steps of 90 metrics, as `or1 "
        "report` draws them, in headless Chromium that is started for each measurement.",
        (("first contentful paint", "≤ 3 s"), ("page", "≤ 50 MB")),
    ),
    Section(
        "verify_peers",
        "The code verifier compared with others",
        "python benchmarks/verify.py --livecodebench CHECKOUT --verl CHECKOUT",
        "76 honest and 32 dishonest hand-written submissions, also given to LiveCodeBench's own harness and verl's "
        "prime_code if they support the kind; the result file lists every disagreement. Then 30 trivial tests of one "
        "submission, one submission at a time: ours starts a sandbox per stdin test, theirs run all tests in one "
        "unconfined process.",
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
        "How long a save blocks the training loop, compared with a plain memory copy of the same state.",
        (("loop held / memory copy of the state", "≤ 1.5"),),
    ),
    Section(
        "convert",
        "Converters",
        "python benchmarks/convert.py --scratch FOLDER",
        "HF folder to Megatron checkpoint and back, whole commands from start to exit, compared with cp -r and fsync "
        "of the same bytes. Memory is the peak of RssAnon, summed over processes.",
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
        "Slices from every trainer rank, over gloo and over shared memory, compared with gathering on rank 0 and "
        "broadcasting (`gloo`): 100M parameters in bf16, TP2 x PP2 to two engines. Bytes are those that the "
        "transports count. The plain copy sends the same messages through the same transport to bare processes.",
        (("slices, times as fast as gloo, to TP1 engines", "≥ 1.3"), ("the same to TP2 engines", "≥ 2")),
    ),
    Section(
        "certificate",
        "The cost of certifying a handoff",
        "python benchmarks/certificate.py",
        "Handoffs of 100M parameters in bf16, TP2 to two engines, in turn with and without checksums; and the probe "
        "of the quickstart's second stage.",
        (("checksums over handoff", "≤ 10%"), ("probe over step", "≤ 1%")),
    ),
    Section(
        "handoff_large",
        "A handoff of 2 GB",
        "python benchmarks/handoff_large.py --before CHECKOUT_OF_5408816",
        "A policy with the shape of Qwen2.5-0.5B in fp32, on one trainer rank, to one engine over shared memory, in "
        "turn with the commit before messages became small and layers were filled in place. Seconds inside parts of "
        "the trainer and of the engine, which overlap in time.",
        (("a handoff", "≤ 3 s"),),
    ),
    Section(
        "decoding",
        "A decoding iteration of a tiny model",
        "python benchmarks/decoding.py --before CHECKOUT_OF_5408816",
        "256 requests of the quickstart's model of 0.8M parameters in one engine on one thread, in turn with the "
        "commit before the seeds of requests were drawn many at once. What is in none of vLLM's parts is ours.",
        (("this tree / the other", "≤ 1.000"),),
    ),
    Section(
        "handoff_forecast",
        "Forecast of handoffs of large models",
        "python benchmarks/handoff_forecast.py",
        "Nothing is sent: these are the planner's bytes over the busiest rank's link, at 400 Gb/s and at NVLink's 450 "
        "GB/s in each direction; packing, checksums and loading come on top. A row is a trainer and its engines. "
        "Published figures were measured by others on other clusters and show the order of magnitude: 32B dense, a "
        "30B mixture shard to shard, and vLLM's sharded backend at 235B.",
    ),
    Section(
        "chaos",
        "Random kills and stops",
        "python benchmarks/chaos.py --mean-s 45 --faults 40",
        "Whole quickstarts whose processes are killed or stopped at random, with nobody touching anything. Effective "
        "training time is the wall time of an undisturbed run over that of a disturbed one. To progress: from a fault "
        "to the next row of metrics, the end of the step under way included, where no other fault came meanwhile. "
        "Later: how much later than in the undisturbed run that row came, counted from the row before the fault.",
        (("runs finished", "all"), ("effective training time", "≥ 45%")),
    ),
    Section(
        "chaos_rare",
        "The same, a fault in two minutes",
        "python benchmarks/chaos.py --mean-s 120 --faults 10 --name chaos_rare",
        "As above.",
        (("runs finished", "all"), ("effective training time", "≥ 70%")),
    ),
    Section(
        "paired_commits",
        "What keeping a run going costs when nothing fails",
        "python benchmarks/paired_commits.py --before CHECKOUT_OF_5887e70",
        "A short quickstart, in turn with the commit before signs of life, checkpoints in memory and comparisons of "
        "replicas, which also lacks all other changes since.",
        (("its upper bound (95%)", "≤ 1.03"),),
    ),
    Section(
        "guards",
        "What the guards against silent damage cost a step",
        "python benchmarks/guards.py",
        "A short quickstart with two data-parallel ranks whose state lies on the host between updates: the share of a "
        "step that the slower rank spends on the comparison of replicas (the wait for the other rank included), on "
        "checksums of messages, and on the copy for a checkpoint in memory.",
        (("each of them but the copy", "≤ 1%"),),
    ),
    Section(
        "host_memory",
        "The estimate of memory without GPUs",
        "python benchmarks/host_memory.py",
        "Two steps of the quickstart, shortened, with the quickstart's model or with random weights and a vocabulary "
        "of 151,936. The measured peak of each kind of process (PSS), and the error of the estimate by which a run is "
        "refused, as a share of what was measured, without its sign. The estimate's constants were fitted to two of "
        "the runs.",
        (("each process", "≤ 10%"),),
    ),
    Section(
        "plan_on_cpu",
        "The plan's seconds without GPUs",
        "python benchmarks/plan_on_cpu.py --folder FOLDER",
        "A step of five other short runs than those of the quickstart that the plan is calibrated on: the error as a "
        "share of what was measured, without its sign ([planning.md](planning.md) has the verbs).",
        (("each run's step", "≤ 15%"),),
    ),
    Section(
        "data_pipeline",
        "The data pipeline",
        "python benchmarks/data_pipeline.py --scratch FOLDER",
        "The steps that need no model, verifier or sandbox, each in its own process on one thread: rows per second of "
        "CPU time and peak resident memory, on synthetic rows with the columns of NuminaMath-1.5.",
        (("each step, rows per CPU second", "≥ 5,000"), ("each step, peak memory at 1M rows", "≤ 2 GiB")),
    ),
    Section(
        "data_quality",
        "Near-duplicates",
        "python benchmarks/data_quality.py",
        "Variants of the example's problems: half are the same problem in other words, half a different problem that "
        "looks alike. A variant counts as found if it is taken for a copy of its base.",
        (("recall", "≥ 0.950"), ("precision", "≥ 0.950")),
    ),
    Section(
        "quickstart",
        "The quickstart",
        "python benchmarks/quickstart.py --seeds 1 2 3",
        "Whole runs of examples/quickstart/run.sh; docs/quickstart.md explains them.",
    ),
    Section(
        "peers",
        "The quickstart's task in TRL",
        "python benchmarks/peers.py --rounds 2",
        "Same model, prompts, D_R, group size, T (that of the quickstart's first stage, then of its second), learning "
        "rate and cores, by turns: this trainer as the quickstart runs, with one stage, and TRL's GRPOTrainer with "
        "transformers' generation, with the processes and micro-batch that were fastest for it. Evaluations do not "
        "count. Seconds to an accuracy on held-out problems, measured after each step, are those of the steps alone.",
        tuple((f"T {tokens}: a step, TRL / ours, median of the pairs", "≥ 2.5") for tokens in (56, 96)),
    ),
    Section(
        "gpu_devices",
        "One GPU by itself",
        "benchmarks/gpu/run.sh devices",
        "Limits: 75% of the memory's rate on its data sheet, 65% of its dense bf16 rate, 60% of the host link's.",
        (("copies, bf16 matrix product", ""),),
    ),
    Section(
        "gpu_layouts",
        "Layouts on one GPU",
        "benchmarks/gpu/run.sh layouts",
        "The largest difference of any layout from transformers with torch's AdamW, on a random model of 8 layers, "
        "vocabulary 5,003, at every layout of one GPU: recompute none, selective and full, the one-pass head, the "
        "distributed optimizer. In bf16 the reference computes in fp32 on the rounded weights. "
        "Bounds: three times those of or1 check-parity (log-prob 3e-5 and 0.75, gradient 3e-4 and 0.45).",
        (("layouts that differ from transformers", "≤ 0"),),
    ),
    Section(
        "gpu_kernels",
        "Fused head on one GPU",
        "benchmarks/gpu/run.sh kernels",
        "N=32768, H=5120, V=152064 in bf16. The floor is the time of the matrix products alone, at the rate that one "
        "such product reaches on the same GPU: 8NHV for recompute, 6NHV for one_pass. Liger's "
        "kernel is a plain cross-entropy without entropy. verl's stopped at an assertion, probably that gradients are "
        "contiguous. The benchmark's loss has been changed so that they are; its kernel has not been measured since.",
        (("recompute, floor / time", "≥ 85%"), ("time, one_pass / recompute", "≤ 0.85")),
    ),
    Section(
        "gpu_transports",
        "Handoff transports on GPUs",
        "benchmarks/gpu/run.sh transports",
        "Random bf16 tensors from trainer ranks to as many engine ranks, packed, sealed, compared and copied out, "
        "without vLLM; compared with one copy of the same bytes on the device.",
        (("cuda_ipc", ""), ("nccl", ""), ("nccl+cuda_ipc", "")),
    ),
    Section(
        "gpu_throughput",
        "A Megatron policy on one GPU",
        "benchmarks/gpu/run.sh throughput",
        "Forward, backward and optimizer step of random Qwen2 models in bf16 with fp32 master weights and our own "
        "layers. MFU counts 6 operations per token and weight of a matrix product, and causal attention, but no "
        "recomputation.",
        (("tokens per second, MFU, peak memory", ""),),
    ),
    Section(
        "gpu_offload",
        "Offload on one GPU",
        "benchmarks/gpu/run.sh offload",
        "Parameters and optimizer state to the host and back, compared with a plain copy of as many bytes between "
        "page-locked memory and the GPU.",
        (("each way / plain copy", "≥ 85%"), ("bit-exact", "yes"), ("freed on the device / held", "≥ 95%")),
    ),
    Section(
        "math_verifier",
        "The math verifier",
        "python benchmarks/math_verifier.py --suite DIR",
        "Right answers refused and wrong answers accepted, on the labelled pairs of tests/data/math_pairs (notations "
        "that are known to be hard, far above everyday rates; nothing was tuned on the frozen third) and on "
        "Math-Verify's own tests with its authors' labels. The same for verify.math.judge: math_verify, the released "
        "code's verdicts, and for two rules written from their descriptions. Verdicts per second of CPU time include "
        "the worker process.",
        (
            ("frozen third, refused beside judge math_verify", "≤ 0.75"),
            ("frozen third, accepted beside judge math_verify", "≤ 1/3"),
            ("verdicts/s/core", "≥ 400"),
        ),
    ),
)


def document(results: Path) -> str:
    """Return docs/performance.md, from the result files in a folder."""
    found = {section.name: result_of(section.name, results) for section in SECTIONS}
    on_gpu = any(result is not None for name, result in found.items() if name.startswith("gpu_"))
    parts = [HEADER.rstrip("\n"), "" if on_gpu else NO_GPU.strip("\n")]
    parts += [part for section in SECTIONS for part in section_lines(section, found[section.name])]
    return "\n\n".join(part for part in parts if part) + "\n"


def result_of(name: str, results: Path) -> dict[str, Any] | None:
    """Return a section's result; that of ``gpu_CHECK`` is the check's part of gpu.json. None: there is none."""
    kind, _, check = name.partition("_")
    if kind != "gpu":
        return load(results / f"{name}.json")
    return (load(results / "gpu.json") or {}).get(check)


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
