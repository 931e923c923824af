"""Runs one peer's grader in its own process, for benchmarks/verify.py. The peers' code is not part of this repository.

    python verify_peer.py livecodebench|verl CHECKOUT

Lines in: {"truth": {inputs, outputs, fn_name?}, "source", "answer"}. The reply, {"accepted", "wall_s"}, goes to the
file ``answer``: the submissions run unconfined and may write to any open descriptor.
Each submission is judged in a fork that is killed after a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 60


def livecodebench(checkout: str) -> Callable[[Mapping[str, Any], str], bool]:
    """Return a call of the harness as its own evaluation makes it: all results above zero is a pass."""
    sys.path.insert(0, checkout)
    import numpy as np
    from lcb_runner.evaluation.compute_code_generation_metrics import evaluate_generations_by_problem

    def judge(truth: Mapping[str, Any], source: str) -> bool:
        sample = {"input_output": json.dumps(truth)}
        results, _ = evaluate_generations_by_problem(([source], sample, False, 6))
        return bool(np.all(np.array(results[0]) > 0))

    return judge


def verl(checkout: str) -> Callable[[Mapping[str, Any], str], bool]:
    """Return a call of ``prime_code.compute_score``. It needs pyext, which Python 3.11 cannot install: a stand-in."""

    class RuntimeModule:
        @staticmethod
        def from_string(name: str, doc: str, source: str) -> types.ModuleType:
            module = types.ModuleType(name, doc)
            exec(source, module.__dict__)
            return module

    pyext: Any = types.ModuleType("pyext")
    pyext.RuntimeModule = RuntimeModule
    sys.modules["pyext"] = pyext
    sys.path.insert(0, str(Path(checkout, "verl/utils/reward_score")))
    from prime_code import compute_score

    def judge(truth: Mapping[str, Any], source: str) -> bool:
        accepted, _ = compute_score(f"```python\n{source}\n```", json.loads(json.dumps(truth)))
        return bool(accepted)

    return judge


def main() -> None:
    judge = {"livecodebench": livecodebench, "verl": verl}[sys.argv[1]](sys.argv[2])
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.setsid()
            started_s = time.perf_counter()
            try:
                accepted = judge(request["truth"], request["source"])
            except BaseException:
                accepted = False
            reply = {"accepted": accepted, "wall_s": time.perf_counter() - started_s}
            aside = Path(request["answer"] + ".part")
            aside.write_text(json.dumps(reply))
            aside.rename(request["answer"])
            os._exit(0)
        deadline_s = time.monotonic() + LIMIT_S
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline_s:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):  # what remains of the grader's helpers
            os.killpg(child, signal.SIGKILL)
        if not Path(request["answer"]).exists():
            Path(request["answer"]).write_text(json.dumps({"accepted": False, "wall_s": LIMIT_S}))
        print("done", flush=True)


if __name__ == "__main__":
    main()
