"""Runs untrusted programs, each in a new sandbox, and chooses the tier. ``sandbox.program`` shows how to use it.

There are two tiers: "bubblewrap", which needs namespaces, and "landlock", which resists the same attacks; "auto" takes
the first that runs a program on this machine. "weak" is the second tier without Landlock: it is used only if the
configuration names it, and logs a warning.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

from or1_verify.config import VerifyConfig
from or1_verify.sandbox.bubblewrap import Bubblewrap
from or1_verify.sandbox.cgroups import CgroupPool
from or1_verify.sandbox.confined_process import ConfinedProcess
from or1_verify.sandbox.landlock import Landlock
from or1_verify.sandbox.limits import SandboxLimits, configured_limits, node_memory_bytes
from or1_verify.sandbox.program import Program, SandboxResult, SandboxTier, SandboxUnavailable

_PROBE = Program({"main.py": b"print(int(input()) * 7)"}, ("{python}", "{box}/main.py"))
_FINDER = Program(
    {"main.py": b"from importlib.util import find_spec\nprint(*(m for m in input().split() if find_spec(m) is None))"},
    ("{python}", "{box}/main.py"),
)
_PROBE_LIMITS = SandboxLimits(cpu_s=30.0, wall_s=60.0)
_TIERS: Mapping[str, Callable[[Path], Bubblewrap | Landlock]] = {
    "bubblewrap": Bubblewrap,
    "landlock": Landlock,
    "weak": partial(Landlock, confine_files=False),
}
_PACKAGES = ("numpy", "numpy.libs", "pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments")
"""Packages that programs may import in addition to the standard library: NumPy, and pytest with what it needs."""
_LEFT_OUT = shutil.ignore_patterns("*-packages", "test", "tests", "config-*", "ensurepip", "idlelib", "tkinter")
NO_NUMPY = "programs cannot import numpy in the sandbox, whose Python is {}: those that do are judged wrong"
_log = logging.getLogger(__name__)


class Sandbox(AbstractContextManager["Sandbox"]):
    """Runs untrusted programs. Construction runs a probe, and raises SandboxUnavailable if no tier works here."""

    def __init__(self, limits: SandboxLimits, tier: SandboxTier = "auto", node_memory_bytes: int | None = None) -> None:
        """Choose a tier. ``node_memory_bytes``: limit of all this machine's sandboxes, where cgroups can be used."""
        self.limits = limits
        self._cgroups = CgroupPool.open(node_memory_bytes)
        self._tier: Bubblewrap | Landlock
        failures = []
        for name in ("bubblewrap", "landlock") if tier == "auto" else (tier,):
            for interpreter in _interpreters():
                try:
                    self._tier = _TIERS[name](interpreter)
                    result = self.run(_PROBE, b"6", _PROBE_LIMITS)
                except (SandboxUnavailable, OSError) as error:
                    failures.append(f"{name} with {interpreter}: {error}")
                    continue
                if result.succeeded and result.output == b"42\n":
                    self.tier = self._tier.name
                    self._announce(failures)
                    return
                failures.append(f"{name} with {interpreter}: {result.errors.strip() or result.failure}")
        raise SandboxUnavailable(
            "no sandbox starts here, so problems of ability 'code' cannot be verified (math can). "
            f"{Bubblewrap.needs}. {Landlock.needs}. Tried: " + "; ".join(dict.fromkeys(failures))
        )

    def _announce(self, failures: Sequence[str]) -> None:
        if self.tier == "weak":
            _log.warning(
                "verify.sandbox=weak: untrusted programs can read every file that their user can, and write where "
                "it can; they have no network and no processes. Use it on machines that hold nothing of value"
            )
        if self.missing({"numpy"}):
            _log.warning("%s", NO_NUMPY.format(self._tier.interpreter))
        if any(failure.startswith("bubblewrap") for failure in failures) and self.tier == "landlock":
            _log.warning("the sandbox is Landlock's: no namespaces here (%s)", "; ".join(failures))

    def missing(self, modules: Iterable[str]) -> set[str]:
        """Return the top-level ``modules`` that programs in the sandbox cannot import."""
        return set(self.run(_FINDER, " ".join(modules).encode(), _PROBE_LIMITS).output.decode().split())

    def run(self, program: Program, stdin: bytes = b"", limits: SandboxLimits | None = None) -> SandboxResult:
        """Run a program once, with ``limits`` or else the sandbox's own limits. Thread-safe. Raises SandboxFailure."""
        with self._launch(program, stdin, limits or self.limits) as launched:
            launched.release()
            return launched.finish(launched.read() or "exited")

    def open(self, program: Program, limits: SandboxLimits | None = None) -> ConfinedProcess:
        """Start a program that answers line by line (``ConfinedProcess.ask``). Raises SandboxFailure."""
        launched = self._launch(program, None, limits or self.limits)
        assert launched.process.stdin is not None
        os.set_blocking(launched.process.stdin.fileno(), False)
        launched.release()
        return launched

    @property
    def cgroups(self) -> int:
        """The version of the cgroups in use, or 0 if cgroups cannot be used."""
        return self._cgroups.version if self._cgroups else 0

    def _launch(self, program: Program, stdin: bytes | None, limits: SandboxLimits) -> ConfinedProcess:
        launched = self._tier.launch(program, stdin, limits, self._cgroups is not None)
        try:
            launched.wait_at_gate(self._cgroups)
        except BaseException:
            launched.close()
            raise
        return launched

    def close(self) -> None:
        """Remove this process's cgroups."""
        if self._cgroups is not None:
            self._cgroups.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def open_sandbox(config: VerifyConfig) -> Sandbox:
    """Return the sandbox that the configuration names. Raises SandboxUnavailable if that sandbox does not work here."""
    sandbox = Sandbox(SandboxLimits(), config.sandbox, node_memory_bytes(config))
    sandbox.limits = configured_limits(config, bool(sandbox.cgroups))
    return sandbox


def _interpreters() -> Iterator[Path]:
    """Yield the interpreters to try: first ours, so that submissions get the Python version that the user runs.

    In a virtual environment our base interpreter has no packages, so a copy with _PACKAGES comes first.
    """
    ours = Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    if sys.prefix == sys.base_prefix:
        yield ours
    with suppress(OSError, RuntimeError, ValueError):  # such as no room, no home, an installation of another form
        yield _with_packages(ours)
    yield from (ours, Path(os.path.realpath("/usr/bin/python3")))


def _with_packages(python: Path) -> Path:
    """Return a copy of our Python with those of _PACKAGES that are installed. A sandbox's user can read the copy.

    The copy is made at the first call. Raises OSError, RuntimeError or ValueError if it cannot be made.
    """
    stdlib, cache = Path(sysconfig.get_path("stdlib")), Path("/var/cache")  # root's home is nobody else's to read
    if os.geteuid() != 0:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    packages = [Path(sysconfig.get_path("platlib"), name) for name in _PACKAGES]
    libraries = [stdlib, *(package for package in packages if package.exists())]
    shared = sorted(Path(sys.base_prefix, "lib").glob("libpython3*.so*"))
    key = repr([(str(path), path.stat().st_mtime_ns) for path in (python, *libraries, *shared)])
    copy = cache / "or1_megatron" / f"python-{zlib.crc32(key.encode()):08x}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    with copy.with_suffix(".lock").open("w") as lock:  # verifiers start at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not copy.exists():
            begun = copy.with_suffix(".partial")
            shutil.rmtree(begun, ignore_errors=True)
            lib, binaries = begun / stdlib.relative_to(sys.base_prefix), begun / "bin"
            for library in libraries:  # packages beside the standard library, which every build of Python finds
                copy_whole = shutil.copy2 if library.is_file() else partial(shutil.copytree, ignore=_LEFT_OUT)
                copy_whole(library, lib if library == stdlib else lib / library.name)
            binaries.mkdir()
            for file in (python, *shared):
                shutil.copy2(file, binaries)
            for folder in (copy.parent, begun, lib.parent, binaries):
                folder.chmod(0o755)
            begun.rename(copy)
    return copy / "bin" / python.name
