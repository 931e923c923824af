"""Compares Megatron at every parallel layout with transformers + torch: a self-test, and ``or1 check-parity``.

The ranks (``parallel.parity``) are started once per dtype, as many as the largest layout needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from or1_megatron.config.schema import ModelConfig, ParallelConfig
from or1_megatron.selftest.models import random_qwen2
from or1_megatron.selftest.one_check import CheckFailed, Context
from or1_megatron.selftest.process import run_function
from or1_megatron.selftest.setups import KINDS, layouts_for, small_shape
from or1_megatron.sizing.conflicts import layout_conflicts
from or1_megatron.sizing.parallel_layouts import LayoutError, choose_layers, parse_layout
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.files import check_weight_files
from or1_megatron.weights.shape import Shape

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
"""Largest tolerated difference of each kind (``parallel.parity.Deviation``), unless ``_ROUNDINGS`` allows a larger one.

In bfloat16 rounding causes the differences, because the reference computes in fp32 on the rounded weights. Three steps
change parameters by less than bf16 resolves, so ``parameters`` is left out."""
_ROUNDINGS: Final = {"float32": 8.0, "bfloat16": 2.0}
"""A difference may be this many times as large as the difference that rounding alone causes in transformers, since the
order of sums differs. In a deep model this allows more than ``TOLERANCE``."""
_DTYPES: Final[dict[str, Any]] = {"fp32": "float32", "bf16": "bfloat16"}
DEFAULTS: Final[dict[str, Any]] = {"sequences": 24, "longest": 48, "seed": 1, "objective": "clipped", "args": {}}
"""Defaults of a task: number of sequences, longest sequence in tokens, seed, objective and its arguments."""


def layouts(context: Context) -> None:
    """Compare every parallel layout that the devices allow, on a random model. In bf16 on a GPU, the model has
    Transformer Engine's layers if this package is installed, as in a run."""
    machine = context.machine
    model = random_qwen2(small_shape(machine.cuda), context.folder, torch.float32)
    names = layouts_for(machine.cuda, machine.devices)
    sequences, longest = (16, 256) if machine.cuda else (6, 48)  # on CPU: four rows, two of them with two sequences
    context.measure("bf16: layers", choose_layers(ParallelConfig(), "bfloat16").kind)
    wrong = []
    for short, dtype in _DTYPES.items():
        task = task_of(ModelConfig(hf=model, dtype=dtype), names, sequences=sequences, longest=longest)
        rows, lines = differences(task)
        wrong += [f"{short}: {line}" for line in lines]
        differing = sum(bool(row["beyond"]) for row in rows)
        context.measure(f"{short}: layouts", len(rows))
        context.require(f"{short}: layouts that differ from transformers", differing, at_most=0)
        for kind in ("log_prob", "gradient", "entropy") if rows else ():
            value, name = max((row["difference"][kind], row["name"]) for row in rows)
            context.measure(f"{short}: largest difference, {kind_in_words(kind)} ({name})", value)
    if wrong:
        raise CheckFailed("; ".join(wrong))


def default_layouts(longest: int, experts: bool = False) -> tuple[str, ...]:
    """Return one layout per kind of parallelism (EP only with experts), two combinations of kinds, and two layouts
    with longer packed rows. ``longest``: longest sequence in tokens."""
    kinds = ("1", *KINDS, "TP2 PP2", "TP2 CP2", *(("EP2",) if experts else ()))
    return (*kinds, f"1 rows{2 * longest}", f"1 rows{3 * longest + longest // 3} shuffled")


def task_of(
    model: ModelConfig,
    layouts: Sequence[str] = (),
    leave_out: Callable[[str], None] = lambda sentence: None,
    **settings: Any,
) -> dict[str, Any]:
    """Return the task for ``measure_on_ranks``.

    Args:
        layouts: texts for ``parallel_layouts.parse_layout``; a layout that the model does not allow is an error.
            Empty: the layouts of ``default_layouts`` that the model allows.
        leave_out: called with a sentence for each default layout that is left out.
        settings: values that replace those of ``DEFAULTS``.

    Raises:
        LayoutError: a layout cannot work.
        ModelError: the model cannot be read.
    """
    task = {**DEFAULTS, **settings, "model": model.model_dump(mode="json"), "layouts": []}
    hf = read_hf_config(model.hf)
    check_weight_files(model.hf, hf)
    shape = Shape.of(hf)
    for name in layouts or default_layouts(task["longest"], shape.experts is not None):
        conflicts = "; ".join(layout_conflicts(parse_layout(name, task["longest"]).parallel, shape))
        if conflicts and layouts:
            raise LayoutError(f"layout '{name}' cannot work: {conflicts}")
        if conflicts:
            leave_out(f"{name}: {conflicts}")
        else:
            task["layouts"].append(name)
    return task


def differences(task: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure the layouts of a task on ranks that are started once. Call it in the main thread only.

    Returns:
        (records, lines). Each layout that was measured before the ranks ended has a record (``measure_on_ranks``). The
        record's key ``beyond`` has a sentence for each difference that exceeds its bound. ``lines`` has all these
        sentences, and if ranks failed, a sentence that names the layouts that were not measured.
    """
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # torch and Megatron warn once per rank
    dtype = task["model"]["dtype"]
    ranks = max((parse_layout(name, task["longest"]).parallel.ranks for name in task["layouts"]), default=1)
    status, noted = run_function(f"{__name__}:one_rank", task, ranks, "the comparison")
    rows = noted or []
    for row in rows:
        row["beyond"] = list(beyond(row, dtype))
        row["times"] = max(row["difference"][kind] / max(row["rounding"][kind], 1e-12) for kind in TOLERANCE[dtype])
    wrong = [f"{row['name']}: {line}" for row in rows for line in row["beyond"]]
    if status:
        missing = ", ".join(task["layouts"][len(rows) :]) or "nothing"
        wrong.append(f"the ranks ended with exit status {status}; not measured: {missing}")
    return rows, wrong


def one_rank(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Measure a task's layouts as one rank; rank 0 notes each layout's numbers as soon as they are measured."""
    from or1_megatron.parallel.parity import measure_on_ranks

    torch.set_num_threads(1)
    store, rank, _ = next(dist.rendezvous("env://"))
    measured = []
    for row in measure_on_ranks(task, "probe", store, rank):
        measured.append(row)
        note(measured)


def beyond(row: Mapping[str, Any], dtype: str) -> Iterator[str]:
    """Yield a sentence for each difference in a layout's record that exceeds its bound. It names the worst tensor."""
    difference = row["difference"]
    for kind, bound in bounds(row["rounding"], dtype).items():
        value = difference[kind]
        if not value <= bound:
            where = f" of {difference[f'{kind}_at']}" if f"{kind}_at" in difference else ""
            yield f"{kind_in_words(kind)}{where} differs by {value:.2e}; expected at most {bound:.0e}"


def bounds(rounding: Mapping[str, Any], dtype: str) -> dict[str, float]:
    """Return the largest tolerated difference of each kind. It is three times as large on a GPU, where the order of the
    sums in a matrix product depends on the product's size, so that fp32's last bits differ more than on a CPU."""
    times = 3.0 if torch.cuda.is_available() else 1.0
    return {kind: times * max(bound, _ROUNDINGS[dtype] * rounding[kind]) for kind, bound in TOLERANCE[dtype].items()}


def kind_in_words(kind: str) -> str:
    return {"log_prob": "log-prob", "parameters": "3 steps"}.get(kind, kind.replace("_", " "))
