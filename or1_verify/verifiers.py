"""Makes the verifier of each ability: math, code, or a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from or1_verify.code.verifier import CodeVerifier
from or1_verify.config import VerifyConfig
from or1_verify.custom import CustomVerifier
from or1_verify.math.verifier import MathVerifier
from or1_verify.types import Verifier

_MAKERS: Mapping[str, Callable[[VerifyConfig], Verifier]] = {
    "math": lambda config: MathVerifier(config.timeout_s, config.math),
    "code": CodeVerifier,
}

ABILITIES = frozenset(_MAKERS)


def known_abilities(config: VerifyConfig) -> frozenset[str]:
    """Return the abilities that can be verified: math, code, and those of the user's own verifiers."""
    return ABILITIES | config.custom.keys()


def build_verifiers(config: VerifyConfig, abilities: Iterable[str]) -> dict[str, Verifier]:
    """Return a verifier for each ability. A user's own verifier (``verify.custom``) takes precedence over ours.

    Raises ValueError if an ability has no verifier, VerifierBroken if a user's own verifier cannot be loaded, and
    SandboxUnavailable if "code" is asked for and no sandbox works on this machine.
    """
    wanted = sorted(set(abilities))
    known = known_abilities(config)
    if unknown := [ability for ability in wanted if ability not in known]:
        raise ValueError(f"no verifier for ability {unknown}; expected one of: {', '.join(sorted(known))}")
    return {
        ability: CustomVerifier(ability, config) if ability in config.custom else _MAKERS[ability](config)
        for ability in wanted
    }
