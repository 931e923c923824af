"""Faults in the processes of a run: Python imports this where it is first on the path, and SABOTAGE names the fault.

flip: trainer rank 0 flips a bit on its way to the engines, in its second handoff.
kill: engines kill themselves, each way once: while receiving, when they have loaded, while decoding. SABOTAGE_FOLDER
holds what has happened.
memory: a bit of an engine's final norm flips, when its tensors have been compared with what it received; later of a
batch on its way to rank 1, and of the responses on their way to rank 0.
turns: as kill, with engines that take turns with the trainer as on its GPUs. Files in SABOTAGE_FOLDER/device stand for
who holds the device; an engine that sleeps loses its weights to NaN. One dies before it sleeps, too, and so does the
RolloutManager.
clock: Python's clock of the day is ahead by the seconds in the file SABOTAGE_FOLDER/clock (8 bytes).
in_flight: as kill, but engines get SABOTAGE_SIGNAL, one at each of POINTS, each in another handoff of the loop, with
requests in flight. Engines keep their last two responses from their end until the loop waits for them, and it makes a
handoff when a response of the last step that is asked is there. The file of a point has the seeds of the engine's
requests.
hold: the loop waits after step SABOTAGE_STEP until a stop is requested, however slow or fast the machine is.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any


def once(what: str) -> bool:
    try:
        (Path(os.environ["SABOTAGE_FOLDER"]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die(what: str) -> None:
    if once(what):
        os.kill(os.getpid(), signal.SIGKILL)


def flip(transfer: Any) -> None:
    pack = transfer.pack

    def spoil(shipment: Any, message: Any, read: Any, handoff: int) -> int:
        total: int = pack(shipment, message, read, handoff)
        if handoff == 2:
            message[1001] ^= 2
        return total

    transfer.pack = spoil


def kill_receiving(worker: Any) -> None:
    unpack = worker.unpack
    received = 0

    def unpack_some(shipment: Any, message: Any, handoff: int) -> Any:
        nonlocal received
        received += 1
        if received == 3:
            die("receiving")
        return unpack(shipment, message, handoff)

    worker.unpack = unpack_some


def kill_loaded_or_decoding(engine: Any) -> None:
    finish, step = engine.VllmEngine.finish_weight_update, engine.VllmEngine.step
    steps = 0

    def finish_weight_update(self: Any, version: int) -> None:
        finish(self, version)
        if version == 2:
            die("loaded")

    def step_some(self: Any) -> Any:
        nonlocal steps
        steps += self.version == 3
        if steps > 5:
            die("decoding")
        return step(self)

    engine.VllmEngine.finish_weight_update, engine.VllmEngine.step = finish_weight_update, step_some


def hold_device(who: str) -> Path:
    return Path(os.environ["SABOTAGE_FOLDER"]) / "device" / who


def awake_engines() -> list[str]:
    return sorted(path.name for path in hold_device("").glob("engine-*"))


def give_turns(synced: Any) -> None:
    sharing, init = synced.DeviceSharing, synced.SyncedPolicy.__init__
    synced.DeviceSharing = lambda **arguments: sharing(engines_sleep=True, trainer_offloads=True)

    def init_and_sleep(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self._engines.sleep()
        hold_device("trainer").touch()

    synced.SyncedPolicy.__init__ = init_and_sleep


def trainer_holds_device(module: Any) -> None:
    restore, offload = module.Offload.restore, module.Offload.offload

    def restore_alone(self: Any, *things: str) -> int:
        if os.environ["RANK"] == "0":
            assert awake_engines() == [], f"{awake_engines()} have the device"
            hold_device("trainer").touch()
        moved: int = restore(self, *things)
        return moved

    def offload_all(self: Any, *things: str) -> int:
        moved: int = offload(self, *things)
        if os.environ["RANK"] == "0" and len(self.away) == 3:
            hold_device("trainer").unlink(missing_ok=True)
        return moved

    module.Offload.restore, module.Offload.offload = restore_alone, offload_all


def kill_taking_turns(engine: Any) -> None:
    kill_loaded_or_decoding(engine)
    Engine = engine.VllmEngine
    init, step = Engine.__init__, Engine.step

    def spoil(worker: Any) -> None:
        for parameter in worker.model_runner.model.parameters():
            parameter.data.fill_(float("nan"))

    def init_alone(self: Any, settings: Any) -> None:
        assert settings.serves_folder or not hold_device("trainer").exists(), "the trainer has the device"
        init(self, settings)
        hold_device(f"engine-{settings.index}").touch()

    def sleep(self: Any) -> None:
        if self.version == 4 and not self._asleep:
            die("before sleep")
        assert not self._pending, "it decodes"
        self._llm.collective_rpc(spoil)
        self._asleep = True
        hold_device(f"engine-{self._settings.index}").unlink(missing_ok=True)

    def wake_up(self: Any, tags: Any) -> None:
        if "kv_cache" in tags:
            assert not hold_device("trainer").exists(), "the trainer has the device"
            hold_device(f"engine-{self._settings.index}").touch()
            self._asleep = False

    def step_awake(self: Any) -> Any:
        assert not self._asleep or not self._serving, "it decodes asleep"
        return step(self)

    Engine.__init__, Engine.sleep, Engine.wake_up, Engine.step = init_alone, sleep, wake_up, step_awake


def kill_manager(scheduler: Any) -> None:
    end, ended = scheduler.Scheduler.end, 0

    def end_some(self: Any, ticket: int) -> Any:
        nonlocal ended
        ended += 1
        if ended == 2:
            die("collecting")
        return end(self, ticket)

    scheduler.Scheduler.end = end_some


def flip_in_engine(worker: Any) -> None:
    """At the engine's second handoff."""
    finish = worker.ShardWeightTransferEngine.finish_weight_update
    handoffs = 0

    def finish_and_flip(self: Any) -> None:
        nonlocal handoffs
        finish(self)
        handoffs += 1
        if handoffs == 2 and once("flipped in engine"):
            weight = dict(self.model.named_parameters())["model.norm.weight"]
            weight.data.view(worker.torch.int32)[3] ^= 1 << 30

    worker.ShardWeightTransferEngine.finish_weight_update = finish_and_flip


def happened(what: str) -> bool:
    return (Path(os.environ["SABOTAGE_FOLDER"]) / what).exists()


def flip_in_batch(lockstep: Any) -> None:
    """In the attempt after the engine's flip."""
    receive, after = lockstep._receive, happened("flipped in engine")

    def receive_and_flip(source: int, group: Any) -> Any:
        blob = receive(source, group)
        if after and once("flipped in batch"):
            blob[blob.numel() // 2] ^= 1
        return blob

    lockstep._receive = receive_and_flip


def flip_in_responses(client: Any) -> None:
    """In the attempt after the batch's flip."""
    unpack, after = client.unpack, happened("flipped in batch")

    def flip_and_unpack(packed: bytes) -> Any:
        if after and once("flipped in responses"):
            packed = packed[:1000] + bytes([packed[1000] ^ 1]) + packed[1001:]
        return unpack(packed)

    client.unpack = flip_and_unpack


POINTS = ("before start", "receiving", "loaded", "before certify", "serving")
flying: list[int] = []
"""Seeds of the requests that this engine had when its last handoff began."""


def strike(point: str) -> None:
    """End or stop this engine, unless it had no requests in flight, or an earlier point has not been tried."""
    folder = Path(os.environ["SABOTAGE_FOLDER"])
    if not flying or point != next((each for each in POINTS if not happened(each)), None):
        return
    try:
        (folder / "armed").unlink()
    except FileNotFoundError:
        return
    (folder / point).write_text(" ".join(map(str, flying)))
    os.kill(os.getpid(), int(os.environ["SABOTAGE_SIGNAL"]))


def strike_receiving(worker: Any) -> None:
    unpack, received = worker.unpack, {"handoff": 0, "messages": 0}

    def unpack_some(shipment: Any, message: Any, handoff: int) -> Any:
        if handoff != received["handoff"]:
            received.update(handoff=handoff, messages=0)
        received["messages"] += 1
        if received["messages"] == 2:
            strike("receiving")
        return unpack(shipment, message, handoff)

    worker.unpack = unpack_some


def strike_in_handoffs(engine: Any) -> None:
    Engine = engine.VllmEngine
    start, finish, certify, step = (
        Engine.start_weight_update,
        Engine.finish_weight_update,
        Engine.certify,
        Engine.step,
    )
    steps = 0  # since the last handoff

    def start_weight_update(self: Any) -> None:
        flying[:] = [request.seed for request, _ in self._pending.values()]
        strike("before start")
        start(self)

    def finish_weight_update(self: Any, version: int) -> None:
        finish(self, version)
        strike("loaded")

    def certify_some(self: Any, version: int) -> None:
        nonlocal steps
        steps = 0
        strike("before certify")
        certify(self, version)

    def step_some(self: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            left = {request.seed for request, _ in self._pending.values()}
            flying[:] = [seed for seed in flying if seed in left]
            strike("serving")
        if 0 < len(self._pending) <= 2 and not happened("needed"):
            time.sleep(0.01)
            return []
        return step(self)

    Engine.start_weight_update, Engine.finish_weight_update = start_weight_update, finish_weight_update
    Engine.certify, Engine.step = certify_some, step_some


def keep_in_flight(loop: Any) -> None:
    roll_out, hand_off = loop.Loop.roll_out, loop.Loop.hand_off
    folder = Path(os.environ["SABOTAGE_FOLDER"])

    def roll_out_whole(self: Any, *arguments: Any) -> None:
        (folder / "needed").touch()
        roll_out(self, *arguments)
        (folder / "needed").unlink()

    def begun(self: Any) -> bool:
        from or1_megatron.rollout.request_plan import request_seed
        from or1_megatron.runtime.message import unpack
        from or1_megatron.runtime.seeds import derive_seed

        stage, packed = self.schedule.at(self.steps_done), self.ports.rollouts.finished_responses()
        roll_out = derive_seed(self.config.seed, "rollout", self.steps_done + self.supply.asked - 1)
        places = [(p, s) for p in range(stage.prompts_per_step) for s in range(stage.group_size)]
        seeds = {request_seed(roll_out, *place) for place in places}
        return bool(packed) and any(each.seed in seeds for each in unpack(packed))

    def hand_off_in_flight(self: Any) -> Any:
        if self.supply.asked:
            while not begun(self) and not self.ports.stop():
                time.sleep(0.05)
            (folder / "armed").touch()
        return hand_off(self)

    loop.Loop.roll_out, loop.Loop.hand_off = roll_out_whole, hand_off_in_flight


def hold(loop: Any) -> None:
    train_step, step = loop.Loop.train_step, int(os.environ["SABOTAGE_STEP"])

    def held(self: Any) -> None:
        while self.steps_done == step and not self.ports.stop():
            time.sleep(0.05)
        train_step(self)

    loop.Loop.train_step = held


def move_clock() -> None:
    with (Path(os.environ["SABOTAGE_FOLDER"]) / "clock").open("rb") as file:
        memory = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + struct.unpack("d", memory)[0]
    time.time_ns = lambda: nanoseconds() + int(1e9 * struct.unpack("d", memory)[0])


FAULTS: dict[str, dict[str, Any]] = {
    "clock": {},
    "hold": {"or1_megatron.rl.loop": hold},
    "in_flight": {
        "or1_megatron.rl.loop": keep_in_flight,
        "or1_megatron.handoff.shard.worker": strike_receiving,
        "or1_megatron.rollout.engine": strike_in_handoffs,
    },
    "memory": {
        "or1_megatron.handoff.shard.worker": flip_in_engine,
        "or1_megatron.parallel.lockstep": flip_in_batch,
        "or1_megatron.rollout.client": flip_in_responses,
    },
    "flip": {"or1_megatron.handoff.shard.transfer": flip},
    "kill": {
        "or1_megatron.handoff.shard.worker": kill_receiving,
        "or1_megatron.rollout.engine": kill_loaded_or_decoding,
    },
    "turns": {
        "or1_megatron.trainer.synced_policy": give_turns,
        "or1_megatron.parallel.offload": trainer_holds_device,
        "or1_megatron.handoff.shard.worker": kill_receiving,
        "or1_megatron.rollout.engine": kill_taking_turns,
        "or1_megatron.rollout.scheduler": kill_manager,
    },
}


class Saboteur(importlib.abc.MetaPathFinder):
    def __init__(self, faults: dict[str, Any]) -> None:
        self._faults = faults

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        fault = self._faults.pop(name, None)
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
