"""Runs one vLLM engine: makes its SamplingParams, scores prompts, takes new weights, then drops the prefix cache.

vLLM's core runs in this process, without vLLM's engine-core process: the engine already has a process of its own, and
every token would otherwise cross one more socket. ``engine_pool.engine_env`` has the environment for this. The engine
reads what vLLM's core returns, because vLLM's output processor would take ten times as long for each token
(docs/performance.md).

Seeds: the random bits of a token depend on its request's seed and its position in the response alone
(``worker.SeededSampler``). But logits differ in the last bits with the composition of the batch, so the same seed in
another batch can, rarely, give another token. The same requests submitted in the same order to a fresh engine give the
same tokens on CPU.

Weights: an engine decodes only with weights that the trainer has checked. From ``start_weight_update`` on all requests
wait, also the requests in flight. After ``finish_weight_update`` the engine answers ``score_prompts``, with which the
trainer checks the weights. ``resume_generation`` then makes the engine decode with these weights.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.data.template import load_tokenizer
from or1_megatron.rollout.engine_metrics import EngineMetrics
from or1_megatron.rollout.request_plan import request_digest
from or1_megatron.runtime.host_memory import return_large_blocks
from or1_megatron.runtime.imports import quick_imports
from or1_megatron.runtime.timeline import span
from or1_megatron.runtime.world import share_gloo_thread
from or1_megatron.types import Completion, Float32Array, Int32Array, Request, RoutedExperts, VersionSpan

WORKER_EXTENSION = "or1_megatron.rollout.worker.WorkerExtension"
ROUTING_EXTENSION = "or1_megatron.rollout.routed_experts.RoutingExtension"

# vLLM's default budget of 4096 tokens makes a batch of 256 short prompts wait in two waves.
_CPU_STEP_TOKENS = 16384
_CPU_BLOCK_TOKENS = 32  # the smallest that the CPU attention kernel takes; 8% faster than vLLM's 128 on short responses
_FREE_AT_START = 0.05  # of the device's memory
_POLL_S = 0.001
_ROW_BYTES = 12  # token, log-prob and entropy of a token in fp32


def wait_without_spinning() -> None:
    """On CPU, make this process sleep between polls for messages. Each of vLLM's processes calls this.

    Under tensor parallelism the readers of vLLM's queues spin for a second after every message. On CPU these readers
    take the cores from other processes, for example from a trainer that packs weights meanwhile. vLLM's other way of
    waiting loses some notifications if many come at once, and the reader then sleeps for 5 s.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        shm_broadcast.sched_yield = partial(time.sleep, _POLL_S)


def save_host_memory() -> None:
    """On CPU, make this process return freed memory, and stop vLLM from packing embeddings for oneDNN. Nothing reads
    the packed copy, which is as large as the embedding. Each of vLLM's processes calls this."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import vocab_parallel_embedding as layers
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    return_large_blocks()
    method = layers.UnquantizedEmbeddingMethod
    pack = method.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if isinstance(layer, layers.ParallelLMHead):
            pack(self, layer)
        else:  # an embedding that a model computes logits with, too, does so with its weight
            layer.cpu_linear = linear

    method.process_weights_after_loading = process_weights_after_loading


def pass_rows_as_bytes() -> None:
    """Make vLLM's core in this process return a request's rows (made by ``worker.SeededSampler``) as bytes.

    vLLM's own code makes four objects per token. Making and freeing them takes longer than all our work on a token.
    """
    from vllm.v1.outputs import LogprobsLists

    def slice_request(self: Any, request: int, tokens: int) -> bytes:
        first = request if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[request]
        rows: bytes = self.logprobs[first : first + tokens].tobytes()
        return rows

    LogprobsLists.slice_request = slice_request


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine. ``index`` is the engine's number among the run's engines."""

    index: int
    model: Path
    dtype: Literal["float32", "bfloat16"]
    max_model_tokens: int
    """Tokens of the longest prompt + response."""
    config: RolloutConfig
    serves_folder: bool = True
    """Whether the engine may decode with the weights in the folder ``model``. If not, it waits for a handoff."""
    metrics_port: int | None = None  # at which the engine serves vLLM's metrics


@dataclass(slots=True)
class _InFlight:
    """A request and its response so far."""

    request: Request
    started_s: float
    table: bytearray = field(default_factory=bytearray)  # of ``worker.SeededSampler``, ``_ROW_BYTES`` per token
    versions: list[VersionSpan] = field(default_factory=list)
    version: str | None = None  # of the weights that made the last token
    stats: Any = None  # of ``engine_metrics``


class VllmEngine:
    """A vLLM engine. Not thread-safe: one owner submits, steps and updates it."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the model; its weights are version 0 until the first update.

        Raises:
            ValueError: vLLM cannot run the model with this folder, these sizes or this device.
        """
        if not (settings.model / "config.json").is_file():
            raise ValueError(f"engine {settings.index}: {settings.model} is not an HF model folder (no config.json)")
        with quick_imports():
            from vllm import LLM, SamplingParams
            from vllm.platforms import current_platform

            if settings.config.tensor_parallel == 1:  # or the worker is another process
                from vllm.v1.worker import gpu_worker  # noqa: F401  # the base of all workers, which vLLM imports later

        share_gloo_thread()
        wait_without_spinning()
        pass_rows_as_bytes()
        self._settings = settings
        self._sampling_params = SamplingParams
        self._drafts = settings.config.engine_args.get("speculative_config") is not None
        self._llm = LLM(
            model=str(settings.model),
            dtype=settings.dtype,
            max_model_len=settings.max_model_tokens,
            max_num_seqs=settings.config.max_concurrent,
            tensor_parallel_size=settings.config.tensor_parallel,
            enable_prefix_caching=True,
            scheduling_policy="priority",  # first come, first served, but for the probe
            logprobs_mode="processed_logprobs",  # those of the sampled distribution: temperature applied
            disable_log_stats=settings.metrics_port is None,
            weight_transfer_config={"backend": "slices"},  # as ``handoff.vllm.receiver`` is known to vLLM
            worker_extension_cls=ROUTING_EXTENSION if settings.config.router_replay else WORKER_EXTENSION,
            **_device_options(settings, is_cpu=current_platform.is_cpu()) | settings.config.engine_args,
            **({"per_request_spec_decode_metrics": "summary"} if self._drafts else {}),
        )
        self._engine = self._llm.llm_engine
        self._metrics = EngineMetrics(self._engine, settings.metrics_port) if settings.metrics_port else None
        self._engine.set_weight_version("0")
        self._llm.collective_rpc("sample_by_seeds")
        self._tokenizer = load_tokenizer(Path(settings.model))
        self._pending: dict[str, _InFlight] = {}
        self._names = map(str, itertools.count())
        self._finished: list[Completion] = []  # not yet returned by ``step``
        self._scores: dict[str, Any] = {}  # the outputs of vLLM's core for score_prompts
        self._probed: Int32Array | None = None
        self._updating = False
        self._serving = settings.serves_folder
        self._asleep = False
        # Objects from the start-up stay, and a step makes thousands of short-lived ones: without this the collector
        # walks vLLM's modules again and again (3% of the decoding time of a small model).
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 100)

    def metrics_fault(self) -> str:
        """Return why Prometheus cannot read the engine's metrics. Empty if it can, or if no port is configured."""
        return "" if self._metrics is None else self._metrics.fault

    @property
    def pending(self) -> int:
        return len(self._pending) + len(self._finished)

    @property
    def idle(self) -> bool:
        """Return whether ``step`` has nothing to do: there are no requests, or the weights are not checked yet."""
        return not self._serving or not self.pending

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests for decoding. They wait while weights are replaced.

        Raises:
            ValueError: a prompt and the longest allowed response together exceed the engine's longest sequence, or a
                seed is not an integer of 64 bits.
        """
        for request in requests:
            total = len(request.prompt.token_ids) + request.sampling.max_response_tokens
            if total > self._settings.max_model_tokens:
                raise ValueError(
                    f"engine {self._settings.index}: problem {request.prompt.problem.id} "
                    f"({request.prompt.problem.origin}) has {len(request.prompt.token_ids)} prompt tokens; with "
                    f"max_response_tokens = {request.sampling.max_response_tokens} that is {total}, above the engine's "
                    f"max_model_tokens = {self._settings.max_model_tokens}"
                )
            if not 0 <= request.seed < 1 << 64:
                raise ValueError(
                    f"engine {self._settings.index}: {_name(request)} has the seed {request.seed}; expected an integer "
                    "of 64 bits, 0 or more"
                )
            params = self._sampling_params(
                temperature=request.sampling.temperature,
                top_p=request.sampling.top_p,
                max_tokens=request.sampling.max_response_tokens,
                extra_args={"seed": request.seed},  # with ``seed``, vLLM would make a generator
                logprobs=0,  # the sampled token's alone
            )
            self._pending[self._add(request.prompt.token_ids, params)] = _InFlight(request, time.time())

    def step(self) -> list[Completion]:
        """Run one decoding iteration and return the finished completions; return at once when idle."""
        if not self._serving:
            return []
        if self._pending:
            self._iterate()
        finished, self._finished = self._finished, []
        return finished

    def abort(self, seeds: Sequence[int]) -> list[int]:
        """Abort the requests of these seeds that have not finished, and return the seeds of the aborted requests."""
        wanted = set(seeds)
        names = [name for name, each in self._pending.items() if each.request.seed in wanted]
        self._engine.engine_core.abort_requests(names)
        return [self._pending.pop(name).request.seed for name in names]

    def abort_all(self) -> list[Completion]:
        """Abort all pending requests, and return the completions that ``step`` has not yet returned."""
        self.abort([each.request.seed for each in self._pending.values()])
        finished, self._finished = self._finished, []
        return finished

    def score_prompts(self, token_ids: Sequence[Int32Array]) -> list[Float32Array]:
        """Return, for each sequence of p tokens, the log-probs [p - 1] of all tokens but the first, at temperature 1.

        The last token of the first sequence is computed on top of the prefix cache, as tokens of responses are. All
        other tokens are computed afresh. Requests in flight advance meanwhile, but ``step`` returns their completions
        only after ``resume_generation``.

        Raises:
            RuntimeError: a weight update was not completed, so that old and new weights may be mixed.
        """
        if self._updating:
            raise RuntimeError(
                f"engine {self._settings.index} cannot score prompts: an update of its weights did not come to its "
                "end, so that old and new ones may be mixed; a complete handoff mends that"
            )
        self._probed = token_ids[0] if len(token_ids) else None
        last = [self._score_last(ids) for ids in token_ids[:1]]
        scores = [self._score_afresh(ids) for ids in token_ids]
        if last:
            scores[0][-1] = last[0]
        return scores

    def _score_last(self, token_ids: Int32Array) -> float:
        """Return the last token's log-prob, computed on top of the prefix cache."""
        params = self._sampling_params(
            temperature=1.0, max_tokens=1, logprob_token_ids=[int(token_ids[-1])], ignore_eos=True
        )
        return float(np.frombuffer(self._score(token_ids[:-1], params).new_logprobs, dtype=np.float32)[2])

    def _score_afresh(self, token_ids: Int32Array) -> Float32Array:
        """Return log-probs [p - 1] of all tokens except the first. vLLM reads no prefix cache for prompt log-probs."""
        if len(token_ids) < 2:
            return np.empty(0, dtype=np.float32)
        params = self._sampling_params(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        return np.asarray(self._score(token_ids, params).new_prompt_logprobs_tensors.logprobs[:, 0], dtype=np.float32)

    def _score(self, token_ids: Int32Array, params: Any) -> Any:
        name = self._add(token_ids, params, priority=-1)
        while name not in self._scores:
            self._iterate()
        return self._scores.pop(name)

    def _iterate(self) -> None:
        with span("decode", requests=len(self._pending)) as seen:
            iteration = self._engine.engine_core.get_output()
            batch = len(iteration.outputs)
            tokens = sum([len(each.new_token_ids) for each in iteration.outputs]) if self._drafts else batch
            seen.update(batch=batch, tokens=tokens)
        if self._metrics is not None:
            self._metrics.record(iteration, self._pending)
        version, now_s = iteration.weight_version, time.time()
        ended: dict[str, Any] = {}
        for output in iteration.outputs:
            flying = self._pending.get(output.request_id)
            if flying is None:
                self._scores[output.request_id] = output
                continue
            if flying.version != version:
                flying.version = version
                flying.versions.append(VersionSpan(int(version), len(flying.table) // _ROW_BYTES))
            if output.new_logprobs is not None:
                flying.table += output.new_logprobs
            if output.finish_reason is not None:
                ended[output.request_id] = output
        routed = self._routed_experts({name: self._pending[name] for name in ended})
        for name, output in ended.items():
            self._finished.append(self._completion(self._pending.pop(name), output, now_s, routed.get(name)))

    def _routed_experts(self, ended: Mapping[str, _InFlight]) -> dict[str, RoutedExperts]:
        """Return, by name, the recorded expert ids of requests that ended in the latest step, if they ask for ids."""
        asked = [
            (name, len(made.request.prompt.token_ids) + len(made.table) // _ROW_BYTES - 1)
            for name, made in ended.items()
            if made.request.sampling.routed_experts
        ]
        found = self._llm.collective_rpc("routed_experts", args=(asked,))[0] if asked else []
        return {name: experts for (name, _), experts in zip(asked, found, strict=True)}

    # The weight-update calls of vLLM's transfer protocol, in the order of their use.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to the trainer. The engine's index tells its workers their ranks in the transfer's process group."""
        self._llm.init_weight_transfer_engine({"init_info": {**init_info, "engine_index": self._settings.index}})

    def start_weight_update(self) -> None:
        """Begin a weight update; an unfinished one is abandoned. All requests wait until ``resume_generation``."""
        if self._serving and not self._asleep and self._probed is not None:
            # Put the probe's tokens into the prefix cache: if it outlives the update, the next probe finds them stale.
            self._score_last(self._probed)
        self._serving = False
        if self._updating:
            self._llm.collective_rpc("abandon_weight_update")
        self._updating = True
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the weights that the trainer sends, and return when the last tensor is in the model."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, version: int) -> None:
        """Complete an update: the model now has the received weights, ``version``. Drop the old weights' prefix cache.

        Raises:
            RuntimeError: the prefix cache of the old weights could not be dropped, or the model does not hold the
                received weights.
        """
        self._llm.finish_weight_update(str(version))
        if not self._engine.reset_prefix_cache(reset_running_requests=True):  # what is in flight is read anew
            raise RuntimeError(
                f"engine {self._settings.index}, version {version}: vLLM would not reset its prefix cache; some of its "
                "blocks are still in use"
            )
        self._updating = False

    def resume_generation(self, version: int) -> None:
        """Decode with the new weights, which the trainer has checked. RuntimeError if they are not of ``version``."""
        if self._updating or version != self.version:
            held = "a mixture" if self._updating else f"version {self.version}"
            raise RuntimeError(f"engine {self._settings.index} cannot serve version {version}: it holds {held}")
        self._serving = True

    @property
    def version(self) -> int:
        return int(self._engine.get_weight_version())

    def sleep(self) -> None:
        """Free the device's memory: drop weights and KV cache (level 2); a handoff brings new weights. GPU only."""
        if self._pending:
            raise RuntimeError(f"engine {self._settings.index} cannot sleep: it decodes {len(self._pending)} requests")
        self._llm.sleep(level=2)
        self._asleep = True

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take device memory back: ``["weights"]`` before a handoff, ``["kv_cache"]`` after it. GPU only."""
        self._llm.wake_up(tags=list(tags))
        self._asleep = self._asleep and "kv_cache" not in tags

    def _add(self, token_ids: Int32Array, params: Any, priority: int = 0) -> str:
        """Give a request to vLLM's core and return the core's name for it. Lower ``priority`` numbers come first."""
        name = next(self._names)
        params.skip_clone = True  # a deep copy takes longer than all else here, and the parameters are this request's
        prompt = {"type": "token", "prompt_token_ids": token_ids.tolist()}
        process, tasks = self._engine.input_processor.process_inputs, self._engine.get_supported_tasks()
        self._engine.engine_core.add_request(process(name, prompt, params, tasks, priority=priority))
        return name

    def _completion(self, made: _InFlight, output: Any, finished_s: float, routed: RoutedExperts | None) -> Completion:
        request, reason = made.request, str(output.finish_reason)
        if reason not in ("stop", "length"):
            raise RuntimeError(
                f"engine {self._settings.index}: vLLM ended {_name(request)} with '{reason}'; expected 'stop' or "
                "'length'"
            )
        tokens, log_probs, entropies = np.frombuffer(made.table, dtype=np.float32).reshape(-1, 3).T
        token_ids = tokens.astype(np.int32)
        if not np.isfinite(log_probs).all():
            raise RuntimeError(
                f"engine {self._settings.index}: {_name(request)} has no distribution at its token "
                f"{np.isfinite(log_probs).argmin()}: the logits hold NaN or +inf, or are all -inf"
            )
        # Special tokens other than the one that ends the response stay in the text: a model's </think> may be one.
        drafts = output.spec_decode_metrics
        text = self._tokenizer.decode(
            (token_ids[:-1] if reason == "stop" else token_ids).tolist(),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return Completion(
            problem_id=request.prompt.problem.id,
            sample_index=request.sample_index,
            token_ids=token_ids,
            log_probs=log_probs.copy(),
            text=text,
            finish_reason="stop" if reason == "stop" else "length",
            versions=tuple(made.versions),
            engine=self._settings.index,
            seed=request.seed,
            started_s=made.started_s,
            finished_s=finished_s,
            drafted_tokens=drafts.num_draft_tokens if drafts else 0,
            accepted_tokens=_accepted(drafts.histogram, len(token_ids)) if drafts else 0,
            request_digest=request_digest(request),
            entropy=float(np.mean(entropies, dtype=np.float64)),
            routed_experts=routed,
        )


def _name(request: Request) -> str:
    return f"sample {request.sample_index} of problem {request.prompt.problem.id}"


def _accepted(histogram: Sequence[int], tokens: int) -> int:
    """Return how many of a response's ``tokens`` were drafted. The first token is never drafted.

    ``histogram``: entry n is the number of forward passes that accepted n drafted tokens. These include drafted tokens
    after the response's end, which vLLM cuts off.
    """
    return min(sum(accepted * passes for accepted, passes in enumerate(histogram)), tokens - 1)


def _device_options(settings: EngineSettings, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments of ``LLM`` that differ between CPU and GPU."""
    config = settings.config
    if not is_cpu:
        options: dict[str, Any] = {
            "gpu_memory_utilization": config.gpu_memory_fraction,
            "enable_sleep_mode": config.placement == "colocated",  # it sleeps while the trainer has the device
            "hf_overrides": {"head_dtype": "float32"},  # of the logits, as the policy's; vLLM's default is the model's
            "async_scheduling": False,  # never tried with a handoff: docs/decisions.md
        }
        if config.kv_cache_bytes is not None:
            # vLLM asks for the fraction to be free at the start, with a size of the cache, too: what the trainer has on
            # the device would prevent a restart.
            options |= {"kv_cache_memory_bytes": config.kv_cache_bytes, "gpu_memory_utilization": _FREE_AT_START}
        if config.tensor_parallel > 1:  # FlashInfer would compile this fusion at the first start, with nvcc
            options |= {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
        return options
    return {
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "enforce_eager": True,  # compiling needs a C++ toolchain and a minute, and gains nothing at this size
        "block_size": _CPU_BLOCK_TOKENS,
        "max_num_batched_tokens": _CPU_STEP_TOKENS,
    }
