"""The list of all checks of ``or1 selftest`` and of the tests marked gpu; ``or1 doctor`` makes the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from or1_megatron.selftest.one_check import CHECKS_PACKAGE, Check
from or1_verify.errors import UserError

_ENGINES: Final = ("megatron-core", "ray", "vllm")
_ENGINES_MODULE: Final = CHECKS_PACKAGE + "engines"
_TRAINING: Final = (*_ENGINES, "math-verify", "examples")
_TRAINING_MODULE: Final = CHECKS_PACKAGE + "training"

MACHINE: Final = Check(
    "machine", "packages, driver, sandbox, memory, disk and loopback are in order: what `or1 doctor` prints"
)
CHECKS: Final = (
    MACHINE,
    Check("devices", "the devices are there and healthy, and their links carry what such devices carry"),
    Check("kernels", "the fused head computes what float64 computes, in the memory that is planned for it"),
    Check(
        "layouts",
        "Megatron computes what transformers computes, at every layout that the devices allow, in fp32 and bf16",
        ("megatron-core",),
        240.0,
    ),
    Check("checkpoint", "a run that is killed continues from what it saved, at another layout", ("megatron-core",)),
    Check(
        "offload",
        "the trainer's state goes to the host and comes back to the bit, and the device's memory comes free",
        ("megatron-core",),
    ),
    Check(
        "handoff",
        "engines hold the policy's weights after a handoff by every transport, and sample with the policy's log-probs",
        _ENGINES,
        300.0,
        _ENGINES_MODULE,
    ),
    Check(
        "sleep",
        "engines that sleep free the device's memory, and compute the same after they wake",
        ("cuda", *_ENGINES),
        180.0,
        _ENGINES_MODULE,
    ),
    Check("sandbox", "an untrusted program runs, and is confined, in each tier of the sandbox", (), 60.0),
    Check(
        "train",
        "the quickstart trains on the devices: engines colocated with the trainer",
        _TRAINING,
        300.0,
        _TRAINING_MODULE,
    ),
    Check(
        "train-separate",
        "the quickstart trains on the devices: engines on devices of their own",
        ("2 devices", "cuda", *_TRAINING),
        300.0,
        _TRAINING_MODULE,
    ),
)


def chosen(names: Sequence[str]) -> list[Check]:
    """Return the checks with these names, in the order of ``CHECKS``; without names all checks.

    Raises:
        UserError: a name is unknown; the message lists all checks.
    """
    known = {check.name: check for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"no check {', '.join(map(repr, unknown))}; there are: {', '.join(known)}")
    return [check for check in CHECKS if not names or check.name in names]
