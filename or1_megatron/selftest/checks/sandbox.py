"""Self-test of the sandbox's tiers: programs run, but cannot read host files, use a network or outlive their limit."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from typing import Final

from or1_megatron.selftest.one_check import Context, NotPossible
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import Program, SandboxTier, SandboxUnavailable
from or1_verify.sandbox.sandbox import Sandbox

TIERS: Final[tuple[SandboxTier, ...]] = ("bubblewrap", "landlock")
_HONEST: Final = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\n"
_HOSTILE: Final = """
import socket, sys
path, port = sys.argv[1:]
try:
    print("read", open(path).read())
except OSError:
    print("no file")
try:
    socket.create_connection(("127.0.0.1", int(port)), timeout=2)
    print("connected")
except OSError:
    print("no network")
"""
_ENDLESS: Final = "while True: pass\n"


def sandbox(context: Context) -> None:
    absent = {}
    for tier in TIERS:
        try:
            with Sandbox(SandboxLimits(cpu_s=30.0, wall_s=60.0), tier) as opened:
                one_tier(context, tier, opened)
        except SandboxUnavailable as error:
            absent[tier] = why_refused(error)
            context.measure(f"{tier}", f"not possible here: {absent[tier]}")
    if len(absent) == len(TIERS):
        raise NotPossible("; ".join(f"{tier}: {why}" for tier, why in absent.items()))


def why_refused(error: SandboxUnavailable) -> str:
    """Return only the part of the error's text that says what was tried."""
    return str(error).partition("Tried: ")[2] or str(error)


def one_tier(context: Context, tier: str, opened: Sandbox) -> None:
    """Run an honest, a prying and an endless program in one tier, and check each result."""
    started_s = time.perf_counter()
    honest = opened.run(_python(_HONEST), b"20 22\n")
    context.require(f"{tier}: an honest program gives its result", honest.succeeded and honest.output == b"42\n")
    context.measure(f"{tier}: start to end", (time.perf_counter() - started_s) * 1e3, "ms")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(folder, "secret")
        secret.write_text("secret")
        Path(folder).chmod(0o755)  # the sandbox must refuse it, not the file's permissions
        secret.chmod(0o644)
        prying = opened.run(_python(_HOSTILE, str(secret), str(server.getsockname()[1])))
        words = prying.output.decode(errors="replace").split("\n")
        print(f"{tier}: the prying program: {words}, {prying.errors}")
        context.require(f"{tier}: the host's files cannot be read", "no file" in words)
        context.require(f"{tier}: the host's network cannot be reached", "no network" in words)
    endless = opened.run(_python(_ENDLESS), limits=SandboxLimits(cpu_s=1.0, wall_s=30.0))
    context.require(f"{tier}: an endless program is ended", endless.ending in ("cpu_time", "wall_time"))


def _python(source: str, *arguments: str) -> Program:
    return Program({"main.py": source.encode()}, ("{python}", "{box}/main.py", *arguments))
