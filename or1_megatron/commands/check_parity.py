"""`or1 check-parity`: does every layout compute what one plain process computes, on the user's own model?

The ranks are started once, as many as the largest layout takes; each layout in turn makes a world of the first of them.
Rank 0 computes the reference with transformers and torch's own AdamW, and holds every layout's numbers against it.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from or1_megatron.config.schema import ModelConfig
from or1_megatron.parallel.mesh import SubWorld, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.parity import Deviation, Numbers, compare, measure, reference
from or1_megatron.rl.batch import pack
from or1_megatron.rl.loss import ClippedPolicyLoss
from or1_megatron.runtime.launch import run_ranks
from or1_megatron.sizing.parallel_layouts import Case, LayoutError, batch_layout, parse_layout
from or1_megatron.sizing.run_plan import layout_conflicts
from or1_megatron.types import Aggregation, Sample
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.files import check_weight_files
from or1_megatron.weights.shape import Shape


def default_layouts(longest: int) -> tuple[str, ...]:
    """Each kind of parallelism, two mixtures, other rows and another order, for sequences of up to ``longest``."""
    kinds = ("1", "TP2", "PP2", "TP2 SP", "PP2 VPP2", "CP2", "DP2", "DP2 distopt", "TP2 PP2", "TP2 CP2")
    return (*kinds, f"1 rows{2 * longest}", f"1 rows{3 * longest + longest // 3} shuffled")


TOLERANCE: Final = {
    "float32": {
        "log_prob": 1e-5,
        "entropy": 1e-5,
        "loss": 1e-5,
        "grad_norm": 1e-4,
        "gradient": 1e-4,
        "parameters": 1e-3,
    },
    "bfloat16": {
        "log_prob": 0.25,
        "entropy": 0.25,
        "loss": 0.01,
        "grad_norm": 0.1,
        "gradient": 0.15,
    },
}
"""Largest tolerated difference of each kind (``parallel.parity.Deviation``). bfloat16: of its own rounding, against
the fp32 reference on the rounded weights; what three steps move is less than bf16 shows and is left out."""

_TEMPERATURE: Final = 0.8
_GRACE_S: Final = 10.0
_RANK_WAIT_S: Final = 1800.0


@dataclass(frozen=True)
class LayoutResult:
    """One line of the table."""

    name: str
    micro_batches: int
    difference: Deviation
    beyond: tuple[str, ...]
    """What differs by more than it may, in words."""


def objective(dtype: str) -> ClippedPolicyLoss:
    """With an entropy bonus, so that both of the head's gradients take part, and a KL penalty; in fp32 with ratios,
    clips and an importance correction too.

    In bf16 rounding would decide which tokens are clipped, and so blow itself up.
    """
    exact = dtype == "float32"
    return ClippedPolicyLoss(
        0.2,
        0.2,
        entropy_coefficient=0.3,
        temperature=_TEMPERATURE,
        on_policy=not exact,
        dual_clip=1.3 if exact else None,
        kl_coefficient=0.1,
        correction="masked" if exact else "off",
        correction_cap=1.5,
    )


def load_network(model: ModelConfig) -> Any:
    """The HF model in fp32, its weights rounded to ``model.dtype`` first, in training mode."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model.hf, dtype=getattr(torch, model.dtype)).float()
    return (network.cuda() if torch.cuda.is_available() else network).train()


def record_probe(network: Any, count: int, longest: int, seed: int) -> list[Sample]:
    """Sequences of 4 to ``longest`` tokens that the model itself has sampled, as a roll-out would.

    A response token of each is not counted, advantages have both signs, and ``policy_log_probs`` are the model's with
    noise, so that ratios spread over the clip range; likewise those of engine and reference. The padding token stays
    out: transformers gives it no gradient.
    """
    rng, others = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    generator = torch.Generator().manual_seed(seed)
    vocabulary, padding = network.config.vocab_size, network.config.pad_token_id
    ids = torch.randint(0, vocabulary, (count, 1), generator=generator)
    if padding is not None:
        ids[ids == padding] = (padding + 1) % vocabulary
    device = next(network.parameters()).device
    with torch.no_grad():
        while ids.shape[1] < longest:
            logits = network(ids.to(device)).logits[:, -1].float().cpu() / _TEMPERATURE
            if padding is not None:
                logits[:, padding] = float("-inf")
            ids = torch.cat((ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
        logits = network(ids.to(device)).logits.float().cpu() / _TEMPERATURE
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0].numpy()
    made = []
    for row, of_row in zip(ids.numpy().astype(np.int32), log_probs, strict=True):
        tokens = int(rng.integers(4, longest + 1))
        prompt = int(rng.integers(1, max(2, tokens // 3)))
        mask = np.ones(tokens - prompt, dtype=np.bool_)
        mask[(tokens - prompt) // 2] = False
        own = of_row[prompt - 1 : tokens - 1]
        noise = rng.normal(0.0, 0.3, tokens - prompt)
        engine, reference = others.normal(0.0, 0.3, (2, tokens - prompt))
        made.append(
            Sample(
                prompt_ids=row[:prompt],
                response_ids=row[prompt:tokens],
                advantage=float(rng.normal()),
                loss_mask=mask,
                engine_log_probs=(own + noise + engine).astype(np.float32),
                policy_log_probs=(own + noise).astype(np.float32),
                reference_log_probs=(own + reference).astype(np.float32),
            )
        )
    return made


def check_parity(
    model: ModelConfig,
    layouts: Sequence[str],
    console: Console,
    *,
    sequences: int = 24,
    longest: int = 48,
    seed: int = 1,
    tolerance: float = 1.0,
    out: Path | None = None,
) -> int:
    """Measure the layouts (``layouts.parse_layout``), print a table, and return the exit status: 0 when all agree.

    Args:
        layouts: those to measure; a model that cannot be cut so is an error. Empty: ``default_layouts``, of which those
            that the model does not allow are named and left out.
        sequences: of the probe, of up to ``longest`` tokens each.
        tolerance: multiplies ``TOLERANCE``.
        out: the numbers as JSON.

    Raises:
        LayoutError, ModelError: at the door, with every conflict.
    """
    hf = read_hf_config(model.hf)
    family_of(hf)
    check_weight_files(model.hf, hf)
    cases = [parse_layout(text, longest) for text in layouts or default_layouts(longest)]
    possible = []
    for case in cases:
        conflicts = list(layout_conflicts(case.parallel, Shape.of(hf)))
        if not conflicts:
            possible.append(case)
        elif layouts:
            raise LayoutError(f"layout '{case.name}' cannot work: {'; '.join(conflicts)}")
        else:
            console.print(f"left out: {case.name}: {'; '.join(conflicts)}", style="yellow")
    with tempfile.TemporaryDirectory(prefix="or1-parity-") as folder:
        task, found = Path(folder, "task.json"), Path(folder, "found.json")
        names = [case.name for case in possible]
        settings = {"sequences": sequences, "longest": longest, "seed": seed, "tolerance": tolerance}
        task.write_text(json.dumps({"model": model.model_dump(mode="json"), "layouts": names, **settings}))
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # torch's and Megatron's, once per rank
        status = run_ranks(
            "or1_megatron.commands.check_parity",
            [str(task), str(found)],
            ranks=max(case.parallel.ranks for case in possible),
            threads_per_rank=1,
            grace_s=_GRACE_S,
            task="the comparison",
            advice=".",
        )
        rows = _read(found) if found.is_file() else []
    show(rows, model.dtype, tolerance, console)
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    for row in rows:
        for line in row.beyond:
            console.print(f"{row.name}: {line}", style="red", soft_wrap=True)
    missing = names[len(rows) :]
    if missing:
        console.print(f"not measured: {', '.join(missing)}", style="red")
    return status or int(bool(missing) or any(row.beyond for row in rows))


def _read(found: Path) -> list[LayoutResult]:
    return [
        LayoutResult(line["name"], line["micro_batches"], Deviation(**line["difference"]), tuple(line["beyond"]))
        for line in json.loads(found.read_text())
    ]


def show(rows: Sequence[LayoutResult], dtype: str, tolerance: float, console: Console) -> None:
    """The table: largest difference of each kind from transformers + torch."""
    kinds = TOLERANCE[dtype]
    title = f"Largest difference from transformers + torch ({dtype})"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("layout\n", no_wrap=True)
    table.add_column("rows\nper rank", justify="right")
    for kind, bound in kinds.items():
        table.add_column(f"{_shown(kind)}\n≤ {bound * tolerance:.0e}", justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        values = [f"{getattr(row.difference, kind):.1e}" for kind in kinds]
        table.add_row(row.name, str(row.micro_batches), *values, "differs" if row.beyond else "equal")
    console.width = max(console.width, 110)  # a pipe's 80 columns would cut the figures
    console.print(table)


def _shown(kind: str) -> str:
    return {"log_prob": "log-prob", "parameters": "3 steps"}.get(kind, kind.replace("_", " "))


def beyond(difference: Deviation, dtype: str, tolerance: float) -> Iterator[str]:
    """What exceeds its bound, with where it is worst."""
    for kind, bound in TOLERANCE[dtype].items():
        value = getattr(difference, kind)
        if not value <= bound * tolerance:
            where = getattr(difference, f"{kind}_at", "")
            yield (
                f"{_shown(kind)}{' of ' + where if where else ''} differs by {value:.2e}; "
                f"expected at most {bound * tolerance:.0e}"
            )


def transformers_numbers(network: Any, samples: Sequence[Sample], dtype: str, by_response: bool = False) -> Numbers:
    """The reference."""
    device = next(network.parameters()).device
    parameters = dict(network.named_parameters())
    numbers = reference(lambda ids: network(ids.to(device)).logits, parameters, samples, objective(dtype), by_response)
    return replace(numbers, gradient=_by_file_name(numbers.gradient), moved=_by_file_name(numbers.moved))


def _by_file_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names in HF's files, where each expert has tensors of its own: transformers joins a layer's in memory."""
    named = {}
    for name, tensor in tensors.items():
        prefix, joined, last = name.partition(".experts.")
        if not joined:
            named[name] = tensor
            continue
        for expert, of_expert in enumerate(tensor):
            parts = of_expert.chunk(2) if last == "gate_up_proj" else (of_expert,)
            for kind, part in zip(last.removesuffix("_proj").split("_"), parts, strict=True):
                named[f"{prefix}.experts.{expert}.{kind}_proj.weight"] = part
    return named


def _measure_case(case: Case, model: ModelConfig, probe: Path, world: SubWorld) -> Numbers | None:
    start_process_group(_RANK_WAIT_S, world)
    try:
        mesh = build_mesh(case.parallel, seed=1)
        samples: list[Sample] = pickle.loads(probe.read_bytes())  # there by now: rank 0 joins when it has written it
        order = case.order(len(samples))
        layout = batch_layout(case.parallel, read_hf_config(model.hf))
        batch = pack([samples[i] for i in order], layout, case.aggregation)
        return measure(model, case.parallel, mesh, batch, order, objective(model.dtype))
    finally:
        stop_process_group()


def _record(model: ModelConfig, task: Mapping[str, Any], probe: Path) -> dict[Aggregation, Numbers]:
    """Write the probe, and compute the reference's numbers for it, by each aggregation that a layout asks for."""
    network = load_network(model)
    samples = record_probe(network, task["sequences"], task["longest"], task["seed"])
    probe.write_bytes(pickle.dumps(samples))
    asked = {parse_layout(name, task["longest"]).aggregation for name in task["layouts"]}
    return {name: transformers_numbers(network, samples, model.dtype, name == "response_mean") for name in asked}


def measure_on_ranks(task: Mapping[str, Any], folder: Path, store: dist.Store, rank: int) -> Iterator[LayoutResult]:
    """One rank's part in the measurement of a task's layouts; rank 0 yields a row for each.

    Args:
        task: ``model`` (of a ModelConfig), ``layouts``, ``sequences``, ``longest``, ``seed``, ``tolerance``.
        folder: one for each task and store; the probe goes there.
        store: of all ranks.
    """
    model, probe = ModelConfig(**task["model"]), folder / "probe.pickle"
    expected = _record(model, task, probe) if rank == 0 else None
    for number, name in enumerate(task["layouts"]):
        case = parse_layout(name, task["longest"])
        if rank >= case.parallel.ranks:
            continue
        try:
            found = _measure_case(case, model, probe, SubWorld(case.parallel.ranks, store, f"{folder}/{number}"))
        except Exception as error:
            error.add_note(f"layout '{name}', rank {rank}")
            raise
        if expected is None or found is None:
            continue
        difference = compare(found, expected[case.aggregation])
        words = tuple(beyond(difference, model.dtype, task["tolerance"]))
        yield LayoutResult(name, found.micro_batches, difference, words)


def main() -> int:
    """One rank of the measurement, under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=Path)
    parser.add_argument("found", type=Path)
    arguments = parser.parse_args()
    task = json.loads(arguments.task.read_text())
    torch.set_num_threads(1)
    store, rank, _ = next(dist.rendezvous("env://"))
    rows: list[LayoutResult] = []
    try:
        for row in measure_on_ranks(task, arguments.task.parent, store, rank):
            rows.append(row)
            arguments.found.write_text(json.dumps([asdict(row) for row in rows]))
    except Exception:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
