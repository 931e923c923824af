"""The quick checks (``or1 doctor``) on this machine, and on damaged ones built from real parts."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.selftest.checks import machine
from or1_megatron.selftest.one_check import CheckOutcome, Context

ROOT = Path(__file__).parents[2]


def findings(check: Callable[[Context], None]) -> dict[str, dict[str, Any]]:
    outcome = CheckOutcome("a check", "passed")
    check(Context(outcome))
    return outcome.figures


def program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_test_machine_can_train() -> None:
    """The tests run on an installed set-up, so nothing may stop training. Every finding says what follows."""
    assert all(entry["status"] == "ok" or entry["follows"] for entry in findings(machine.machine).values())
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "Training can start here." in result.stdout
    assert result.stdout.split()[:5] == ["what", "found", "what", "follows", "ok"]


def test_what_stops_training_is_named_and_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TESTED", {"torch": "0.0.1", "no-such-package-here": "1.0"})
    versions = findings(machine.packages)
    assert (versions["torch"]["status"], versions["torch"]["follows"]) == ("warning", "the tests ran with 0.0.1")
    assert versions["no-such-package-here"]["status"] == "missing"
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "Training cannot start here: no-such-package-here." in result.stdout


def test_known_good_versions_are_those_of_the_lock() -> None:
    text = (ROOT / "requirements" / "cpu.lock").read_text()
    lock = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^+\s]+)", text, re.MULTILINE))
    assert {name: lock[name] for name in machine.TESTED} == machine.TESTED
    assert f"=={machine.TRANSFORMER_ENGINE}\n" in (ROOT / "requirements" / "transformer_engine.lock").read_text()


def test_no_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = findings(machine.confinement)
    tier = found["sandbox: bubblewrap"]
    assert "apt install bubblewrap" in tier["value"]
    other = "not this tier" if found["sandbox: landlock"]["status"] == "ok" else "no code verification"
    assert tier["status"] == "warning" and other in tier["follows"]


def test_a_driver_out_of_order_or_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = "echo 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18"
    program(tmp_path, "nvidia-smi", script, monkeypatch)
    gpu = findings(machine.gpus)["GPU"]
    assert gpu["status"] == "warning" and "version mismatch" in gpu["value"]
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA H100, 81559 MiB, 535.129.03'", monkeypatch)
    monkeypatch.setattr(machine, "driver_problem", lambda: "install a driver of series 580 or newer")
    driver = findings(machine.gpus)["driver"]
    assert driver["status"] == "missing" and "580" in driver["follows"]


def test_a_ray_address_in_the_environment_and_loopback_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = findings(machine.ports)
    assert found["Ray"]["status"] == "warning" and "10.0.0.1:6379" in found["Ray"]["value"]
    assert found["ports"]["status"] == "missing"
