"""A campaign: ablations in the order of importance, what their arms begin with, and a budget of machine-hours.

campaign.yaml, beside the ablations' files:

    order: [6, 9, 13]          # the most important first
    makes: {PATH: COMMAND}     # run from the project's root where an arm's configuration names PATH, if it is missing
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from or1_megatron.ablate.ablation import Arm
from or1_megatron.ablate.runs import CampaignJob, run_jobs
from or1_megatron.ablate.spent import Spent
from or1_megatron.config.base import ConfigError
from or1_megatron.config.schema import Positive, Section
from or1_megatron.config.yaml_reader import read_file

CAMPAIGN: Final = "campaign.yaml"


class Campaign(Section):
    order: tuple[Positive, ...] = Field(min_length=1)
    makes: dict[str, str] = Field(default_factory=dict)
    """{path: shell command that makes it, whole or not at all}; a later one may need an earlier one."""

    def missing(self, arms: Sequence[Arm]) -> dict[str, str]:
        """Return those of ``makes`` whose path an arm's configuration names and that do not exist."""
        named = "".join(json.dumps(arm.config.model_dump(mode="json")) for arm in arms)
        return {
            path: command
            for path, command in self.makes.items()
            if json.dumps(path) in named and not Path(path).exists()
        }


def load_campaign(folder: Path, known: Collection[int]) -> Campaign:
    """Return the campaign of a folder of ablations; without a file all of them by number, and nothing is made.

    Raises ConfigError when the file is wrong, or names an ablation that is not ``known``.
    """
    path = folder / CAMPAIGN
    if not path.is_file():
        return Campaign(order=tuple(known))
    try:
        campaign = Campaign.model_validate_json(json.dumps(read_file(path)[0]), strict=True)
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    unknown = [number for number in campaign.order if number not in known]
    if unknown or len(set(campaign.order)) < len(campaign.order):
        raise ConfigError(f"{path}: order: {list(campaign.order)}; expected some of {sorted(known)}, each once")
    return campaign


def make(path: str, command: str, out: Path, spent: Spent) -> bool:
    """Make what arms begin with; its output goes to OUT/makes.log. Return whether ``path`` exists now."""
    for _ in run_jobs([CampaignJob(path, ["bash", "-c", command], out / "makes.log")], spent):
        pass
    return Path(path).exists()
