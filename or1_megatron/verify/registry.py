"""Which verifier judges which ability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from or1_megatron.config import VerifyConfig
from or1_megatron.interfaces import Verifier
from or1_megatron.verify.code import CodeVerifier
from or1_megatron.verify.math import MathVerifier

_MAKERS: Mapping[str, Callable[[float], Verifier]] = {"math": MathVerifier, "code": CodeVerifier}

ABILITIES = frozenset(_MAKERS)


def build_verifiers(config: VerifyConfig, abilities: Iterable[str]) -> dict[str, Verifier]:
    """A verifier for each ability.

    Raises ValueError for an ability that has none, and SandboxUnavailable when "code" is asked for on a machine that
    cannot run sandboxes; math needs none.
    """
    wanted = sorted(set(abilities))
    unknown = [ability for ability in wanted if ability not in _MAKERS]
    if unknown:
        raise ValueError(f"no verifier for ability {unknown}; expected one of: {', '.join(sorted(_MAKERS))}")
    return {ability: _MAKERS[ability](config.timeout_s) for ability in wanted}
