"""Starts, restarts and ends the run's engines. Each engine is a Ray actor with its own environment, node and GPUs.

A restarted engine is a new actor with the same index. The folder's ``__init__`` says which file detects a lost engine.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.rollout.cluster import check_ray, namespace
from or1_megatron.rollout.engine_args import refusals
from or1_megatron.rollout.engine_group import EngineError, EngineGroup, find_lost_engines, gather
from or1_megatron.rollout.engine_thread import LINGER_S
from or1_megatron.rollout.gpus import KEEP_DEVICES
from or1_megatron.runtime.heartbeat import Heartbeat, beats_folder
from or1_megatron.runtime.imports import quick_imports
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.runtime.timeline import span

__all__ = ["EngineActor", "EngineError", "EngineGroup", "EnginePlace", "EnginePool"]

log = logging.getLogger(__name__)

# torchrun sets these for its ranks. A Ray that rank 0 starts passes them on to the engines, which are no ranks.
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "MASTER_", "ROLE_", "GROUP_WORLD")

START_S = 600.0
"""Deadline for an engine's start (processes, imports, compilation, CUDA graphs). Time to load weights is added."""
_SLOW_STORAGE = 0.2e9  # bytes per second of a network file system that many nodes read at once; all read all weights
_ACTOR_THREADS = 8  # one waits in harvest, one in a call of the handoff; the others answer meanwhile


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """The node and the GPUs of an engine. ``devices``: UUIDs of these GPUs, as CUDA_VISIBLE_DEVICES takes them."""

    node_id: str | None = None
    devices: tuple[str, ...] = ()


@ray.remote(num_cpus=0, max_concurrency=_ACTOR_THREADS)
class EngineActor:
    """A Ray actor with a VllmEngine, which runs on an EngineThread."""

    def __init__(self, settings: Any, run_id: str) -> None:
        """``run_id``: the run's id (``EnginePool``), by which the watchdog finds the engine's heartbeat."""
        heart = Heartbeat(beats_folder(run_id), f"engine {settings.index}")
        for name in list(os.environ):
            if name in _TORCHRUN_VARIABLES or name.startswith(_TORCHRUN_PREFIXES):
                del os.environ[name]
        with quick_imports():
            from or1_megatron.rollout.engine import VllmEngine
            from or1_megatron.rollout.engine_thread import EngineThread

        self._thread = EngineThread(lambda: VllmEngine(settings), f"engine {settings.index}", heart)

    def ready(self) -> str:
        """Return the node's id once the engine is up. Raises what the engine's construction raised."""
        self._thread.call(lambda engine: None)
        return str(ray.get_runtime_context().get_node_id())

    def submit(self, requests: bytes, caller: int = 0) -> None:
        """Submit a packed list of Request (``runtime.message``), because Ray's cost grows with the number of arrays.

        ``caller``: the number of the calling manager (``EngineThread.switch_manager``), here and in the other methods.
        """
        self._thread.call_for(caller, lambda engine: engine.submit(unpack(requests)), None)

    def abort(self, seeds: Sequence[int], caller: int = 0) -> list[int]:
        """Call ``VllmEngine.abort``."""
        return self._thread.call_for(caller, lambda engine: engine.abort(seeds), [])

    def harvest(self, wait_s: float, linger_s: float = LINGER_S, keep: bool = False, caller: int = 0) -> bytes:
        """Return the Harvest of ``EngineThread.harvest``, packed."""
        return pack(self._thread.harvest(wait_s, linger_s, keep, caller))

    def switch_manager(self, caller: int) -> bytes:
        """Return the packed completions of ``EngineThread.switch_manager``."""
        return pack(self._thread.switch_manager(caller))

    def forget(self, seeds: Sequence[int]) -> None:
        self._thread.forget(seeds)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the VllmEngine by name."""
        return self._thread.call(lambda engine: span(method)(getattr(engine, method))(*args))

    def failure(self) -> str | None:
        """Return the error that ended the engine, with its traceback; None while it runs. Does not wait."""
        return self._thread.failure


class EnginePool:
    """The run's engines. The constructor starts them and returns; ``wait_ready`` waits until they are up."""

    def __init__(
        self,
        config: RolloutConfig,
        model: Path,
        dtype: Literal["float32", "bfloat16"],
        max_model_tokens: int,
        run_id: str,
        on_cpu: bool,
        places: Sequence[EnginePlace] | None = None,
        on_restart: Callable[[int, str], None] = lambda index, reason: None,
        metrics_port: int | None = None,
    ) -> None:
        """
        Args:
            max_model_tokens: tokens of the longest prompt + response of any stage or evaluation.
            run_id: the run's id, which ``cluster.start_ray`` also gets.
            on_cpu: whether the engines' nodes have no GPU.
            places: the node and GPUs of each engine. None: Ray chooses, without regard to trainer ranks.
            on_restart: called with (the engine's index, the reason) when an engine is restarted.
            metrics_port: the port at which engine 0 serves vLLM's metrics; engine i uses port + i. None: no metrics.

        Raises:
            EngineError: engines on CPU have no ``kv_cache_bytes``, or ``engine_args`` has a refused argument.
        """
        from or1_megatron.rollout.engine import EngineSettings

        if on_cpu and config.kv_cache_bytes is None:
            raise EngineError(
                "kv_cache_bytes of the engines is not set; on CPU vLLM needs it (67108864, 64 MiB, does for a tiny "
                "model), and would otherwise claim a fraction of all memory"
            )
        if refused := refusals(config.engine_args):  # `or1 eval` comes here unchecked
            raise EngineError("\n".join(refused.values()))
        self._config, self._run_id, self._on_cpu, self._on_restart = config, run_id, on_cpu, on_restart
        self._places = places or [EnginePlace()] * config.engines
        self._started_s = time.monotonic()
        self._deadline = start_deadline(config, model)
        self._settings = [
            EngineSettings(index, model, dtype, max_model_tokens, config, True, metrics_port and metrics_port + index)
            for index in range(config.engines)
        ]
        self.restarts = [0] * config.engines
        """How often each engine was restarted."""
        self.handles = [self._start(settings) for settings in self._settings]

    def _start(self, settings: Any) -> Any:
        place, again = self._places[settings.index], self.restarts[settings.index]
        options: dict[str, Any] = {
            "name": f"engine-{settings.index}" + (f"-restart-{again}" if again else ""),
            "namespace": namespace(self._run_id),
            "num_gpus": 0 if self._on_cpu or place.devices else self._config.tensor_parallel,
            "runtime_env": {"env_vars": engine_env(self._config, place.devices, self._on_cpu)},
        }
        if place.node_id is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        return EngineActor.options(**options).remote(settings, self._run_id)  # type: ignore[attr-defined]

    def wait_ready(self) -> None:
        """Block until every engine is up.

        Raises:
            EngineError: an engine failed to start (with the reason), or was not up by ``start_deadline``.
        """
        timeout_s, reason = self._deadline
        left_s = timeout_s - (time.monotonic() - self._started_s)
        calls = [handle.ready.remote() for handle in self.handles]
        gather(calls, max(left_s, 0.1), "start", reason)
        if self._settings[0].metrics_port is not None:
            asked = [handle.call.remote("metrics_fault") for handle in self.handles]
            for index, fault in enumerate(gather(asked, timeout_s, "tell its port", reason)):
                if fault:
                    log.warning("engine %d: %s", index, fault)

    def restart_lost_engines(self, make_room: Callable[[], None] = lambda: None) -> list[int]:
        """Restart the lost engines (``find_lost_engines``), and return their indices.

        The restarted engines are up but have no weights. ``make_room`` is called before an engine is started.

        Raises:
            EngineError: an engine was lost more often than ``max_engine_restarts``, or did not start again.
            RayLost: Ray is lost too.
        """
        restarted: set[int] = set()
        while lost := find_lost_engines(self.handles):
            check_ray()
            make_room()
            for index, reason in lost.items():
                self._restart(index, reason)
            restarted |= lost.keys()
            self._started_s = time.monotonic()
            try:
                self.wait_ready()
            except EngineError:
                if not find_lost_engines(self.handles):
                    raise
        return sorted(restarted)

    def _restart(self, index: int, reason: str) -> None:
        if self.restarts[index] >= self._config.max_engine_restarts:
            raise EngineError(
                f"engine {index} is lost after {self.restarts[index]} restarts (rollout.max_engine_restarts = "
                f"{self._config.max_engine_restarts}): {reason}"
            )
        log.warning("engine %d is lost and is started again: %s", index, reason)
        ray.kill(self.handles[index], no_restart=True)
        self.restarts[index] += 1
        self._on_restart(index, reason)
        self._settings[index] = replace(self._settings[index], serves_folder=False)
        self.handles[index] = self._start(self._settings[index])

    def control(self, timeout_s: float) -> EngineGroup:
        """Return the group that calls all engines, restarted ones too. ``timeout_s`` is the deadline of each call."""
        return EngineGroup(self.handles, self._config.tensor_parallel, timeout_s)

    def close(self) -> None:
        """End the engines and delete their heartbeats."""
        for handle in self.handles:
            ray.kill(handle, no_restart=True)
        self.handles.clear()
        shutil.rmtree(beats_folder(self._run_id), ignore_errors=True)


def start_deadline(config: RolloutConfig, model: Path) -> tuple[float, str]:
    """Return (the seconds that the engines may take to start with the weights in the folder ``model``, the reason)."""
    if config.start_timeout_s is not None:
        return config.start_timeout_s, f"rollout.start_timeout_s = {config.start_timeout_s:g}"
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return (
        START_S + weights / _SLOW_STORAGE,
        f"rollout.start_timeout_s is not set, so {START_S:g} s and {weights / 1e9:.1f} GB of weights at "
        f"{_SLOW_STORAGE / 1e9:g} GB/s",
    )


def engine_env(config: RolloutConfig, devices: Sequence[str], on_cpu: bool) -> Mapping[str, str]:
    """Return the environment of an engine's process, which vLLM, torch and OpenMP read when they are loaded."""
    env = {
        # The engines run the model runner that runs on CPU, too. GPUs have another by default (docs/decisions.md).
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # CUDA's default. Megatron's 1 comes with the environment of rank 0, if that has started Ray.
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the actor is the engine's process
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # models are folders
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM's n-gram drafts use one thread of numba, and numba's others, by default one a core, spin beside it.
        "NUMBA_NUM_THREADS": "1",
    }
    if on_cpu:
        threads, ranks = config.threads_per_engine, config.tensor_parallel
        groups = [",".join(str(rank * threads + core) for core in range(threads)) for rank in range(ranks)]
        env |= {
            "OMP_NUM_THREADS": str(threads),
            # vLLM binds from core 0 on in every engine, so that several would share it. One rank needs no binding.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if ranks == 1 else "|".join(groups),
            # vLLM compiles a helper of its sampler at the first token: 15 s and a C++ toolchain, for one reduction.
            "TORCH_COMPILE_DISABLE": "1",
            # Large pages where the kernel offers them: at a handoff vLLM packs each weight into memory that is new.
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            # oneDNN keeps 1,024 compiled products, one for each shape, and every number of responses is another shape:
            # an engine grew by 0.5 GiB over 20 rollouts. It is as fast with 128.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        }
    else:
        env |= {
            # Triton's products of fp32 are TF32 by default, vLLM's attention for fp32 among them. The policy's are not.
            "TRITON_F32_DEFAULT": "ieee",
            # By default under the home, which may be on a network: all engines of all nodes would write the same files.
            "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", f"{tempfile.gettempdir()}/or1-vllm-{os.getuid()}"),
        }
    if devices:
        env |= {**KEEP_DEVICES, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    return env
