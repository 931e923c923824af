"""What a machine or a placement cannot run is refused, and what it can run is let through. Nothing is run here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from or1_megatron.config.load import ConfigError
from or1_megatron.config.schema import Config, HandoffConfig
from or1_megatron.handoff.backend_check import check_choice

REFUSED = [
    ({"backend": "shard", "transport": "nccl"}, "separate", False, "transport = nccl needs CUDA"),
    ({"backend": "gloo", "transport": "shared_memory"}, "separate", False, "is for handoff.backend = shard"),
    ({"backend": "shard", "transport": "nccl"}, "colocated", True, "NCCL refuses two ranks on one GPU"),
]


def config_of(handoff: dict[str, Any], placement: str) -> Config:
    made: Any = SimpleNamespace(handoff=HandoffConfig(**handoff), rollout=SimpleNamespace(placement=placement))
    return made


@pytest.mark.parametrize(("handoff", "placement", "cuda", "message"), REFUSED)
def test_what_cannot_run_here_is_refused(handoff: dict[str, Any], placement: str, cuda: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_choice(config_of(handoff, placement), cuda)


def test_what_can_run_is_let_through() -> None:
    for cuda in (False, True):
        for backend in ("shard", "gloo"):
            check_choice(config_of({"backend": backend}, "colocated"), cuda)
    check_choice(config_of({"backend": "shard", "transport": "gloo+shared_memory"}, "colocated"), False)
    check_choice(config_of({"backend": "shard", "transport": "nccl+cuda_ipc"}, "colocated"), True)
    check_choice(config_of({"backend": "shard", "transport": "nccl"}, "separate"), True)
