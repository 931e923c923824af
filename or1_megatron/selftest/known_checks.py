"""The checks of ``or1 selftest`` and of the tests marked gpu; ``or1 doctor`` runs only the check ``machine``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from or1_megatron.selftest.one_check import CHECKS_PACKAGE, Check
from or1_verify.errors import UserError

_MEGATRON: Final = ("megatron-core",)
_ENGINES: Final = (*_MEGATRON, "ray", "vllm")
_TRAINING: Final = (*_ENGINES, "math-verify", "examples")
_SLEEP: Final = ("cuda", *_ENGINES)
_SEPARATE: Final = ("2 devices", "cuda", *_TRAINING)
_BY_ENGINES: Final = CHECKS_PACKAGE + "engines"
_BY_TRAINING: Final = CHECKS_PACKAGE + "training"

MACHINE: Final = Check("machine", "packages, driver, sandbox, memory, disk and loopback are in order (`or1 doctor`)")
CHECKS: Final = (
    MACHINE,
    Check("devices", "the devices are there and healthy, and their links carry what such devices carry"),
    Check("kernels", "the fused head computes what float64 computes, in the memory that is planned for it"),
    Check("layouts", "Megatron computes what transformers does at every layout, in fp32 and bf16", _MEGATRON, 240.0),
    Check("checkpoint", "a run that is killed continues from what it saved, at another layout", _MEGATRON),
    Check("offload", "the trainer's state goes to the host and comes back to the bit; memory comes free", _MEGATRON),
    Check("handoff", "engines get the policy's weights by every transport", _ENGINES, 300.0, _BY_ENGINES),
    Check("sleep", "engines that sleep free memory, and compute the same after they wake", _SLEEP, 180.0, _BY_ENGINES),
    Check("sandbox", "an untrusted program runs, and is confined, in each tier of the sandbox", limit_s=60.0),
    Check("train", "the quickstart trains, with engines on the trainer's devices", _TRAINING, 300.0, _BY_TRAINING),
    Check("train-separate", "the same, with engines on devices of their own", _SEPARATE, 300.0, _BY_TRAINING),
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
