"""Which verifier judges which ability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.interfaces import Verifier
from or1_megatron.verify.code.verifier import CodeVerifier
from or1_megatron.verify.custom.verifier import CustomVerifier
from or1_megatron.verify.math.verifier import MathVerifier

_MAKERS: Mapping[str, Callable[[VerifyConfig], Verifier]] = {
    "math": lambda config: MathVerifier(config.timeout_s),
    "code": CodeVerifier,
}

ABILITIES = frozenset(_MAKERS)


def known_abilities(config: VerifyConfig) -> frozenset[str]:
    """Those that can be verified: ours and the configured verifiers' own."""
    return ABILITIES | config.custom.keys()


def build_verifiers(config: VerifyConfig, abilities: Iterable[str]) -> dict[str, Verifier]:
    """A verifier for each ability.

    A configured one (``verify.custom``) goes before ours. Raises ValueError for an ability that has none,
    VerifierBroken for a configured one that cannot be loaded, and SandboxUnavailable when "code" is asked for on a
    machine that cannot run sandboxes; math needs none.
    """
    wanted = sorted(set(abilities))
    known = known_abilities(config)
    if unknown := [ability for ability in wanted if ability not in known]:
        raise ValueError(f"no verifier for ability {unknown}; expected one of: {', '.join(sorted(known))}")
    return {
        ability: CustomVerifier(ability, config.custom[ability], config.timeout_s)
        if ability in config.custom
        else _MAKERS[ability](config)
        for ability in wanted
    }
