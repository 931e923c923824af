"""Child processes that do not start. Hangs and deaths are in test_math_verifier and test_verify_command."""

from __future__ import annotations

import pytest

from or1_verify.child_process import ChildProcess, ChildUnusable, describe_exit


def test_a_module_that_cannot_be_run_is_named() -> None:
    child = ChildProcess("or1_verify.no_such_module", timeout_s=1.0)
    for _ in range(2):
        with pytest.raises(ChildUnusable, match=r"no_such_module` did not start: it ended; "):
            child.start(wait=True)
        assert child.pid is None


def test_an_exit_status_in_words() -> None:
    statuses = {-9: "killed by SIGKILL", 128 + 25: "killed by SIGXFSZ", 3: "exit status 3", 250: "exit status 250"}
    assert {status: describe_exit(status) for status in statuses} == statuses
