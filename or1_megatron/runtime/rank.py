"""Runs a module as a rank that ends when its launcher ends: ``python -m or1_megatron.runtime.rank MODULE ARGS``.

Importing a rank's module takes seconds. If the launcher is killed meanwhile, the rank must end too: otherwise it
would wait for the launcher's store, and hold the run's lock.
"""

from __future__ import annotations

import os
import runpy
import sys

from or1_megatron.runtime.signals import CPP_LOG_LEVEL, LAUNCH_MARK, QUIET
from or1_verify.child_process import die_with_parent


def main() -> None:
    """Ask the kernel to end this process with its launcher, and run the module."""
    die_with_parent(int(os.environ[LAUNCH_MARK]))
    if os.environ.get(CPP_LOG_LEVEL) == QUIET:
        del os.environ[CPP_LOG_LEVEL]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
