"""The commands of lab/benchmarks/gpu/first_run are those of today. Not shown: that a stage passes on a GPU."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from typer.main import get_group

from or1_megatron.commands.app import app
from or1_megatron.config.load import load_as, load_config
from or1_megatron.evaluate.settings import EvaluationSettings
from or1_megatron.selftest.known_checks import CHECKS, chosen

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "lab/benchmarks/gpu/first_run"


def test_options_keys_and_checks_are_known_and_the_stages_make_all_checks_of_one_gpu() -> None:
    checks, group = set(), get_group(app)
    for options in ([], ["--tiny"]):
        command = [FOLDER / "first.sh", "--print", *options, "v", "q1", "e", "l", "h", "h7", "q32", "s"]
        printed = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout.splitlines()
        for given in (shlex.split(line)[1 + line.startswith("env ") :] for line in printed if "or1 " in line):
            given = given[given[0] == "or1" :]
            name, subcommand, rest = group.resolve_command(group.make_context("or1", [*given]), given)
            assert subcommand is not None
            asked = subcommand.make_context(name, rest).params
            if name == "selftest":
                checks.update(check.name for check in chosen(asked["checks"]))
            elif name == "eval":
                load_as(EvaluationSettings, None, asked["overrides"])
            else:
                load_config(asked["config"], asked["overrides"] or ())
        assert all(
            (ROOT / line.split()[1]).is_file() for line in printed if line.startswith("python ") and ".py" in line
        )
    assert checks == {check.name for check in CHECKS} - {"train-separate"}
