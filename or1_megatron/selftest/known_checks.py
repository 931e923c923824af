"""The checks of ``or1 doctor`` (the quick ones), ``or1 selftest`` and the tests marked gpu, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from or1_megatron.selftest.one_check import CHECKS_PACKAGE, Check
from or1_verify.errors import UserError

_MACHINE: Final = CHECKS_PACKAGE + "machine"
_ENGINES: Final = ("megatron", "ray", "vllm")

CHECKS: Final[tuple[Check, ...]] = (
    Check(
        "packages",
        "the packages are there, fit together and have the versions that the tests ran with",
        "requirements/cpu.lock",
        module=_MACHINE,
        quick=True,
    ),
    Check(
        "gpus",
        "the driver, CUDA, NCCL and Transformer Engine can be used",
        "requirements/gpu.lock",
        module=_MACHINE,
        quick=True,
    ),
    Check(
        "confinement",
        "a program starts in each tier of the sandbox, and can be limited",
        "or1_verify/sandbox/sandbox.py",
        module=_MACHINE,
        quick=True,
    ),
    Check(
        "host",
        "cores, memory, shared memory and disk suffice for the quickstart",
        "or1_megatron/runtime/host_memory.py",
        module=_MACHINE,
        quick=True,
    ),
    Check(
        "ports",
        "processes can meet over the loopback device, and no other Ray is in the way",
        "or1_megatron/rollout/cluster.py",
        module=_MACHINE,
        quick=True,
    ),
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
        "or1_megatron/parallel/parity.py",
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
        "or1_megatron/handoff/sender.py",
        _ENGINES,
        limit_s=300.0,
        module=CHECKS_PACKAGE + "engines",
    ),
    Check(
        "sleep",
        "engines that sleep free the device's memory, and compute the same after they wake",
        "or1_megatron/trainer/synced_policy.py",
        ("cuda", *_ENGINES),
        limit_s=180.0,
        module=CHECKS_PACKAGE + "engines",
    ),
    Check(
        "log-probs",
        "the log-probs of what an engine samples are the policy's",
        "or1_megatron/rollout/engine.py",
        _ENGINES,
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
        (*_ENGINES, "math-verify", "examples"),
        limit_s=300.0,
        module=CHECKS_PACKAGE + "training",
    ),
    Check(
        "train-separate",
        "the quickstart trains on the devices: engines on devices of their own",
        "or1_megatron/trainer/placement.py",
        ("2 devices", "cuda", *_ENGINES, "math-verify", "examples"),
        limit_s=300.0,
        module=CHECKS_PACKAGE + "training",
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
        "or1_megatron/selftest/checks/nodes.py",
        ("several nodes",),
        limit_s=600.0,
    ),
)


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
