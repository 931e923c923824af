"""Attacks on the sandbox, in every tier that this machine has: none is accepted, nothing stays, the next run works.

The attacks are those that we know (``attacks``), which does not prove that there are no others. Bugs of the kernel are
not tested here, nor checkers and test programs, which the code verifier's tests attack.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from attacks import ATTACKS, PROBES, READING, SECRET, SLOW

from or1_verify.code.verifier import CodeVerifier
from or1_verify.config import VerifyConfig
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import Program, SandboxTier, SandboxUnavailable
from or1_verify.sandbox.sandbox import Sandbox
from or1_verify.types import Message, Problem

LIMITS = SandboxLimits(
    cpu_s=1.0, wall_s=4.0, memory_bytes=512 << 20, scratch_bytes=16 << 20, processes=32, output_bytes=1 << 20
)
SHORT = SandboxLimits(cpu_s=0.5, wall_s=0.8, memory_bytes=256 << 20, processes=6)
HONEST = "print(int(input()) * 2)"
TIERS: tuple[SandboxTier, ...] = ("bubblewrap", "landlock")


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    os.environ["OR1_ATTACK_SECRET"] = SECRET
    try:
        made = Sandbox(LIMITS, request.param)
    except SandboxUnavailable as error:
        pytest.skip(f"no {request.param} here: {error}")
    with made:
        yield made
    del os.environ["OR1_ATTACK_SECRET"]


def python(source: str) -> Program:
    return Program({"main.py": source.encode()}, ("{python}", "{box}/main.py"))


def problem(output: str) -> Problem:
    truth = json.dumps({"inputs": ["21\n"], "outputs": [output]})
    return Problem("id", "s", "code", (Message("user", "q"),), truth, {}, "x.jsonl:1")


def answer(source: str) -> str:
    return f"</think>\n```python\n{source}\n```"


def left_behind() -> list[str]:
    """Return living children of this process, and its sandboxes' folders in the folder for temporary files."""
    processes = [child.name() for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return processes + [path.name for path in Path(tempfile.gettempdir()).glob(f"or1-sandbox-{os.getpid()}-*")]


@pytest.fixture(scope="module")
def before() -> list[str]:
    return left_behind()


def verdicts(sandbox: Sandbox, sources: dict[str, str], output: str) -> dict[str, str]:
    """Judge each source, two at a time, each followed by an honest one that must pass. ``output`` is expected."""
    verifier = CodeVerifier(VerifyConfig(), sandbox)

    def judge(source: str) -> str:
        status = verifier.verify(problem(output), answer(source), truncated=False).status
        after = sandbox.run(python(HONEST), b"21\n")
        return status if after.output == b"42\n" else f"{status}, and the honest one after it: {after}"

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(sources, pool.map(judge, sources.values()), strict=True))


def test_no_attack_is_accepted_and_each_leaves_the_sandbox_working(sandbox: Sandbox, before: list[str]) -> None:
    results = verdicts(sandbox, READING, SECRET) | verdicts(sandbox, ATTACKS, "42")
    assert verdicts(sandbox, {"honest": HONEST, "told": f"print({SECRET})"}, SECRET) == {
        "honest": "wrong",
        "told": "right",
    }
    assert {name: status for name, status in results.items() if status != "wrong"} == {}
    assert left_behind() == before


def test_what_does_not_end_is_ended(sandbox: Sandbox, before: list[str]) -> None:
    with ThreadPoolExecutor(3) as pool:
        results = pool.map(lambda source: sandbox.run(python(source), b"21\n", SHORT), SLOW.values())
    endings = {name: (result.ending, result.output) for name, result in zip(SLOW, results, strict=True)}
    # a tier may also refuse it (forks), so that it ends by an error; none ends well
    assert {
        name: ending for name, ending in endings.items() if ending[0] == "exited" and name not in ("spin in C",)
    } == {}
    assert sandbox.run(python(HONEST), b"21\n").output == b"42\n"
    assert left_behind() == before


@pytest.mark.parametrize("probe", PROBES)
def test_nothing_is_within_reach(sandbox: Sandbox, probe: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    tmp_path.chmod(0o777)
    paths = [str(tmp_path / "secret"), "/etc/passwd", "/etc/hostname", "/proc/self/status", "/proc/1/cmdline", __file__]
    paths += [f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/mem", "/sys/kernel/uevent_seqnum", "/root/.bashrc"]
    result = sandbox.run(python(PROBES[probe].replace("{paths!r}", repr(paths))))
    assert (result.exit_status, result.output) == (0, b"[]\n"), result


def test_a_killed_verifier_leaves_no_sandbox(sandbox: Sandbox) -> None:
    """SIGKILL to the process that runs it; the sleeping program goes with it."""
    source = (
        "from or1_verify.sandbox.program import *\nfrom or1_verify.sandbox.sandbox import *\n"
        f"s = Sandbox(SandboxLimits(wall_s=600.0), {sandbox.tier!r})\n"
        "files = {'main.py': b'import time\\nprint(1, flush=True)\\ntime.sleep(987)'}\n"
        "p = Program(files, ('{python}', '{box}/main.py'))\n"
        "x = s._launch(p, None, s.limits)\nx.release()\nprint(x.pid, flush=True)\nx.process.stdout.read(1)\n"
        "print('running', flush=True)\nimport time\ntime.sleep(600)\n"
    )
    child = psutil.Popen([sys.executable, "-c", source], stdout=-1, text=True)
    pid = int(child.stdout.readline())
    assert child.stdout.readline() == "running\n"
    program = psutil.Process(pid)
    child.kill()
    child.wait()
    child.stdout.close()
    _, alive = psutil.wait_procs([program], timeout=300)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert Sandbox(LIMITS, sandbox.tier).run(python(HONEST), b"4\n").output == b"8\n"
    assert list(Path(tempfile.gettempdir()).glob(f"or1-sandbox-{child.pid}-*")) == []


AS_AN_ORDINARY_USER = """
import ctypes, json, os, sys
from test_attacks import *
chosen = dict(list(ATTACKS.items())[::5])
paths = [sys.argv[1], '/proc/self/status', f'/proc/{os.getpid()}/environ', f'/proc/{os.getpid()}/mem']
def all_of_it():
    found = {}
    for tier in TIERS:
        try:
            sandbox = Sandbox(LIMITS, tier)
        except SandboxUnavailable as error:
            found[tier] = f'unavailable: {error}'
            continue
        with sandbox:
            judged = verdicts(sandbox, READING, SECRET) | verdicts(sandbox, chosen, '42')
            judged |= {'honest': verdicts(sandbox, {'': HONEST}, '42')['']}
            for name, source in PROBES.items():
                judged['probe: ' + name] = repr(sandbox.run(python(source.replace('{paths!r}', repr(paths)))).output)
            odd = {name: said for name, said in judged.items() if said not in ('wrong', repr(b'[]\\n'))}
            found[tier] = {'cgroups': sandbox.cgroups, 'odd': odd}
    return found
with Sandbox(LIMITS) as warm:  # whatever is imported late is now; the user below may not be able to read this Python
    verdicts(warm, {'': HONEST}, '42')
os.setgroups([])
os.setresgid(23456, 23456, 23456)
os.setresuid(23456, 23456, 23456)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as for any process that was started by that user
os.environ.update(HOME='/nowhere', OR1_ATTACK_SECRET=SECRET)
print(json.dumps(all_of_it()))
"""


def test_the_sandbox_of_an_ordinary_user(tmp_path: Path) -> None:
    """Every fifth attack and all probes, by a verifier that is not root: no cgroups, and in the second tier no uid of
    the submission's own."""
    if os.geteuid() != 0:
        pytest.skip("the tests above are run by an ordinary user already")
    if closed := [folder for folder in Path(__file__).parents if not folder.stat().st_mode & stat.S_IXOTH]:
        pytest.skip(f"{closed[0]} is closed to other users, so none of them can use this checkout")
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    place = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", AS_AN_ORDINARY_USER, str(secret)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=place)
    results = json.loads(done.stdout or "null")
    expected = {"cgroups": 0, "odd": {"honest": "right"}}
    assert results == dict.fromkeys(TIERS, expected), (results, done.stderr[-2000:])
