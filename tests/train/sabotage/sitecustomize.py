"""Faults in the processes of a run: Python imports this where it is first on the path, and SABOTAGE names the fault.

SABOTAGE_FOLDER holds what has happened; each death and each flipped bit comes once.

memory: bits flip, each in an attempt of its own: of an engine's final norm, when its tensors have been compared with
what it received; of a batch on its way to rank 1.
turns: engines that take turns with the trainer as on its GPUs kill themselves: while receiving, when they have loaded,
while decoding, before they sleep; so does the RolloutManager. An engine that sleeps loses its weights to NaN. Who has
the device when: test_synced_policy.
clock: Python's clock of the day is ahead by the seconds in the file SABOTAGE_FOLDER/clock (8 bytes).
in_flight: engines are killed and stopped in turn, one at each of POINTS, each in another handoff of the loop, with
requests in flight. Engines keep their last two responses from their end until the loop waits for them, and it makes a
handoff when a response of the last step that is asked is there. The file of a point has the seeds of the engine's
requests.
hold: the loop waits after step SABOTAGE_STEP until a stop is requested, however slow or fast the machine is.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import itertools
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def in_folder(what: str) -> Path:
    return Path(os.environ["SABOTAGE_FOLDER"]) / what


def once(what: str) -> bool:
    try:
        in_folder(what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die(what: str) -> None:
    if once(what):
        os.kill(os.getpid(), signal.SIGKILL)


def wrap(
    owner: Any, name: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    """Call ``before`` and ``after`` with the arguments of each call of a function."""
    true = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(*arguments)
        result = true(*arguments, **named)
        if after is not None:
            after(*arguments)
        return result

    setattr(owner, name, wrapped)


def nth(number: int, act: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that calls ``act`` at its own call number ``number``, and otherwise does nothing."""
    calls = itertools.count(1)
    return lambda *_: act() if next(calls) == number else None


FLIPS = ("engine", "batch")


def flips_now(what: str) -> Callable[[], bool]:
    """Return a function that returns True once: in the first attempt after the flips before ``what`` have happened."""
    earlier = FLIPS[: FLIPS.index(what)]
    ready = all(in_folder(flip).exists() for flip in earlier)  # as this attempt's process begins
    return lambda: ready and once(what)


def flip_in_engine(worker: Any) -> None:
    now, engine = flips_now("engine"), worker.SlicesWeightTransferEngine
    handoffs = itertools.count(1)

    def flip(self: Any) -> None:
        if next(handoffs) == 2 and now():
            weight = dict(self.model.named_parameters())["model.norm.weight"]
            weight.data.view(worker.torch.int32)[3] ^= 1 << 30

    wrap(engine, "finish_weight_update", after=flip)


def flip_in_batch(lockstep: Any) -> None:
    receive, now = lockstep.dist.recv_object_list, flips_now("batch")

    def receive_and_flip(received: list[Any], *arguments: Any) -> Any:
        source = receive(received, *arguments)
        if now():
            middle = len(received[0]) // 2
            received[0] = received[0][:middle] + bytes([received[0][middle] ^ 1]) + received[0][middle + 1 :]
        return source

    lockstep.dist.recv_object_list = receive_and_flip


def give_turns(synced: Any) -> None:
    sharing = synced.DeviceSharing
    synced.DeviceSharing = lambda **arguments: sharing(engines_sleep=True, trainer_offloads=True)
    wrap(synced.SyncedPolicy, "__init__", after=lambda self, *arguments: self._engines.sleep())


def kill_receiving(worker: Any) -> None:
    wrap(worker, "unpack", before=nth(3, lambda: die("receiving")))


def kill_taking_turns(engine: Any) -> None:
    Engine = engine.VllmEngine
    decoding = nth(6, lambda: die("decoding"))

    def spoil(worker: Any) -> None:
        for parameter in worker.model_runner.model.parameters():
            parameter.data.fill_(float("nan"))

    def sleep(self: Any) -> None:
        if self.version == 4 and not self._asleep:
            die("before sleep")
        assert not self._pending, "it decodes"
        self._llm.collective_rpc(spoil)
        self._asleep = True

    def wake_up(self: Any, tags: Any) -> None:
        self._asleep = "kv_cache" not in tags

    def step(self: Any) -> None:
        assert not self._asleep or not self._serving, "it decodes asleep"
        if self.version == 3:
            decoding()

    def loaded(self: Any, version: int) -> None:
        if version == 2:
            die("loaded")

    wrap(Engine, "step", before=step)
    wrap(Engine, "finish_weight_update", after=loaded)
    Engine.sleep, Engine.wake_up = sleep, wake_up


def kill_manager(scheduler: Any) -> None:
    wrap(scheduler.Scheduler, "end", before=nth(2, lambda: die("collecting")))


POINTS = ("before start", "receiving", "loaded", "before resume_generation", "serving")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
flying: list[int] = []
"""Seeds of the requests that this engine had when its last handoff began."""


def strike(point: str) -> None:
    """End or stop this engine. Do nothing if it had no requests in flight, or if it is not this point's turn."""
    if not flying or point != next((point for point in POINTS if not in_folder(point).exists()), None):
        return
    try:
        in_folder("armed").unlink()
    except FileNotFoundError:
        return
    in_folder(point).write_text(" ".join(map(str, flying)))
    os.kill(os.getpid(), SIGNALS[POINTS.index(point) % 2])


def strike_receiving(worker: Any) -> None:
    handoffs: list[int] = []  # of each message

    def receive(shipment: Any, message: Any, handoff: int) -> None:
        handoffs.append(handoff)
        if handoffs.count(handoff) == 2:
            strike("receiving")

    wrap(worker, "unpack", before=receive)


def strike_in_handoffs(engine: Any) -> None:
    Engine = engine.VllmEngine
    true_step, steps = Engine.step, 0  # since the last handoff

    def start(self: Any) -> None:
        flying[:] = [each.request.seed for each in self._pending.values()]
        strike("before start")

    def resume_generation(self: Any, version: int) -> None:
        nonlocal steps
        steps = 0
        strike("before resume_generation")

    def step(self: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            left = {each.request.seed for each in self._pending.values()}
            flying[:] = [seed for seed in flying if seed in left]
            strike("serving")
        if 0 < len(self._pending) <= 2 and not in_folder("needed").exists():
            time.sleep(0.01)
            return []
        return true_step(self)

    wrap(Engine, "start_weight_update", before=start)
    wrap(Engine, "finish_weight_update", after=lambda self, version: strike("loaded"))
    wrap(Engine, "resume_generation", before=resume_generation)
    Engine.step = step


def keep_in_flight(loop: Any) -> None:
    def begun(self: Any) -> bool:
        from or1_megatron.rollout.request_plan import request_seed
        from or1_megatron.runtime.message import unpack
        from or1_megatron.runtime.seeds import derive_seed

        stage, packed = self.schedule.at(self.steps_done), self.ports.rollouts.finished_responses()
        roll_out = derive_seed(self.config.seed, "rollout", self.steps_done + self.supply.requested_steps - 1)
        places = [(p, s) for p in range(stage.prompts_per_step) for s in range(stage.group_size)]
        seeds = {request_seed(roll_out, *place) for place in places}
        return bool(packed) and any(response.seed in seeds for response in unpack(packed))

    def wait_for_requests(self: Any) -> None:
        if self.supply.requested_steps:
            while not begun(self) and not self.ports.stop():
                time.sleep(0.05)
            in_folder("armed").touch()

    needed = in_folder("needed")
    wrap(loop.Loop, "roll_out", lambda *_: needed.touch(), lambda *_: needed.unlink())
    wrap(loop.Loop, "hand_off", before=wait_for_requests)


def hold(loop: Any) -> None:
    def wait(self: Any) -> None:
        while self.steps_done == int(os.environ["SABOTAGE_STEP"]) and not self.ports.stop():
            time.sleep(0.05)

    wrap(loop.Loop, "train_step", before=wait)


def move_clock() -> None:
    with in_folder("clock").open("rb") as file:
        memory = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + struct.unpack("d", memory)[0]
    time.time_ns = lambda: nanoseconds() + int(1e9 * struct.unpack("d", memory)[0])


FAULTS: dict[str, dict[str, Callable[[Any], None]]] = {
    "clock": {},
    "hold": {"rl.loop": hold},
    "in_flight": {
        "rl.loop": keep_in_flight,
        "handoff.vllm.receiver": strike_receiving,
        "rollout.engine": strike_in_handoffs,
    },
    "memory": {
        "handoff.vllm.receiver": flip_in_engine,
        "parallel.lockstep": flip_in_batch,
    },
    "turns": {
        "trainer.synced_policy": give_turns,
        "handoff.vllm.receiver": kill_receiving,
        "rollout.engine": kill_taking_turns,
        "rollout.scheduler": kill_manager,
    },
}
"""By fault: the modules of or1_megatron, and the function that changes each module when it has been imported."""


class Saboteur(importlib.abc.MetaPathFinder):
    def __init__(self, faults: dict[str, Any]) -> None:
        self._faults = faults

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        fault = self._faults.pop(name.removeprefix("or1_megatron."), None)
        if fault is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        true = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            true(module)
            fault(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("SABOTAGE"):
    sys.meta_path.insert(0, Saboteur(dict(FAULTS[os.environ["SABOTAGE"]])))
    if os.environ["SABOTAGE"] == "clock":
        move_clock()
