"""Checks the arguments that a run passes on to vLLM's engine (``rollout.engine_args``).

``REFUSED`` lists the arguments that the trainer sets itself, or that would break seeds, log-probs, weight transfer or
sleep. vLLM judges all others, by the annotations and validators of its ``EngineArgs`` (vLLM 0.32.0). The check runs in
another process, because importing vLLM takes seconds and changes the environment, which the ranks would inherit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from or1_megatron.config.base import ConfigError
from or1_megatron.config.keys import did_you_mean
from or1_megatron.config.schema import RolloutConfig

_KEY: Final = "rollout.engine_args"
_MODEL = "the engine must be the model that the policy is, with its tokenizer and its end-of-text tokens: model.hf"
_PRECISION = "the policy's log-probs are compared with the engine's, which must compute in model.dtype"
_PARALLEL = "a handoff is planned for engines that are rollout.tensor_parallel ranks with fixed parts of the weights"
_SAMPLER = "tokens are drawn by samplers of ours, with the random numbers of each request"
_CACHE = "keys and values of old weights would outlive a handoff"
_ON_HOST = "a handoff and a sleep need all weights on the device"
_ADAPTERS = "a handoff brings whole weights, and knows no adapters"
_SLEEP = "rollout.placement says whether engines sleep, and the trainer counts on the memory that they leave"
_SPECULATION = "set speculative_config"

REFUSED: Final[Mapping[str, str]] = {
    "seed": "each request has a seed of its own, from run.seed",
    "max_model_len": "it follows from data.max_prompt_tokens and the longest response",
    "max_num_seqs": "set rollout.max_concurrent",
    "max_num_queued_reqs": "an engine takes all requests, and decodes rollout.max_concurrent at once",
    "max_num_queued_tokens": "an engine takes all requests, and decodes rollout.max_concurrent at once",
    "gpu_memory_utilization": "set rollout.gpu_memory_fraction",
    "kv_cache_memory_bytes": "set rollout.kv_cache_bytes",
    "num_gpu_blocks_override": "set rollout.kv_cache_bytes",
    "tensor_parallel_size": "set rollout.tensor_parallel",
    "weight_transfer_config": "take it out: the handoff sets it",
    "load_format": "an engine reads the safetensors of model.hf, and a handoff brings whole tensors for its loaders",
    "logprobs_mode": "recorded log-probs are those of the distribution that was sampled, temperature applied",
    "disable_log_stats": "set track.prometheus_port",
    "max_logprobs": "a response needs the log-prob of its sampled token alone",
    "kv_sharing_fast_prefill": "it leaves out the log-probs of prompts, which a handoff's probe asks for",
    "enable_prefix_caching": "it is on: a handoff's probe finds out whether stale keys and values are still there",
    "scheduling_policy": "a handoff's probe goes before the requests that wait",
    "scheduler_cls": "a handoff stops and resumes vLLM's own scheduler",
    "worker_cls": "our extension is made for vLLM's own worker",
    "worker_extension_cls": "it is ours, with which engines receive weights",
    "enable_eplb": "it moves experts between ranks, and a handoff's plan would be out of date",
    "per_request_spec_decode_metrics": "the metrics of drafts are made of the summary",
    "attention_backend": "set attention_config: {backend: NAME}",
    **dict.fromkeys(("model", "model_weights", "hf_config_path", "hf_overrides", "model_class_overrides"), _MODEL),
    **dict.fromkeys(("config_format", "model_impl", "runner", "convert", "disable_sliding_window"), _MODEL),
    **dict.fromkeys(("revision", "code_revision", "generation_config", "override_generation_config"), _MODEL),
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), _MODEL),
    **dict.fromkeys(("dtype", "quantization", "quantization_config", "kv_cache_dtype"), _PRECISION),
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size", "enable_elastic_ep"), _PARALLEL),
    **dict.fromkeys(("data_parallel_size", "data_parallel_rank", "data_parallel_size_local"), _PARALLEL),
    **dict.fromkeys(("nnodes", "node_rank", "device_ids", "distributed_executor_backend"), _PARALLEL),
    **dict.fromkeys(("logits_processors", "watermark_config", "enable_batch_sharded_sampling"), _SAMPLER),
    **dict.fromkeys(("kv_transfer_config", "ec_transfer_config", "kv_offloading_size"), _CACHE),
    **dict.fromkeys(("cpu_offload_gb", "offload_group_size", "offload_backend"), _ON_HOST),
    **dict.fromkeys(("enable_lora", "default_mm_loras"), _ADAPTERS),
    **dict.fromkeys(("enable_sleep_mode", "enable_cumem_allocator", "sleep_preserve_parameter_names"), _SLEEP),
    **dict.fromkeys(("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend"), _SLEEP),
    "async_scheduling": "a handoff finds no batch under way (docs/decisions.md)",
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), _SPECULATION),
}
"""Arguments that a run may not give, each with the reason."""

DRAFTS_OF_TEXT: Final = ("ngram", "suffix")
"""Methods of ``speculative_config`` that draft from text, without a draft model and without probabilities."""


def check_engine_args(config: RolloutConfig) -> None:
    """Check ``engine_args`` against ``REFUSED`` and, where vLLM is installed, against vLLM's arguments. Takes seconds.

    Raises:
        ConfigError: an argument is wrong. The message has a line for each fault.
    """
    if not config.engine_args:
        return
    refused = refusals(config.engine_args)
    faulty = list(refused.values())
    if find_spec("vllm") is not None:
        checked = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps({name: value for name, value in config.engine_args.items() if name not in refused}),
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
        )
        if checked.returncode:
            raise ConfigError(f"{_KEY} cannot be checked, because vLLM failed:\n{checked.stderr[-2000:]}")
        faulty += json.loads(checked.stdout.splitlines()[-1])
    if faulty:
        raise ConfigError("\n".join(faulty))


def refusals(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the refused arguments, each with the reason: those in ``REFUSED``, and speculation with a draft model."""
    refused = {name: f"{_KEY}.{name}: refused: {REFUSED[name]}" for name in arguments if name in REFUSED}
    drafts = arguments.get("speculative_config")
    if isinstance(drafts, dict) and drafts.get("method") not in DRAFTS_OF_TEXT:
        refused["speculative_config"] = (
            f"{_KEY}.speculative_config.method: found {json.dumps(drafts.get('method'))}, expected one of "
            f"{', '.join(DRAFTS_OF_TEXT)}: a model that drafts would keep its first weights, which a sleep throws away"
        )
    return refused


def faults(arguments: Mapping[str, Any]) -> list[str]:
    """Return a line for each argument that vLLM's ``EngineArgs`` lacks, and for each value that vLLM does not accept.

    ``speculative_config``, for which ``EngineArgs`` accepts any mapping, is checked as vLLM's ``SpeculativeConfig``.
    """
    from vllm.config.speculative import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    types = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    types["speculative_config"] = SpeculativeConfig
    lines = []
    for name, value in arguments.items():
        if name not in types:
            lines.append(f"{_KEY}.{name}: vLLM's engine has no such argument{did_you_mean(name, types)}")
        elif value is not None or name != "speculative_config":
            lines += [f"{_KEY}.{line}" for line in _judged(name, types[name], value)]
    return lines


def _judged(name: str, kind: Any, value: Any) -> list[str]:
    """Check a YAML value by the type ``kind``. Returns the errors as lines ``name.part: found ..., expected ...``."""
    try:
        TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ImportError as error:  # a method's package
        return [f"{name}: {error}"]
    except ValidationError as error:
        return [_line(name, kind, details) for details in error.errors()]
    return []


def _line(name: str, kind: Any, details: Mapping[str, Any]) -> str:
    key = ".".join((name, *map(str, details["loc"])))
    if details["type"] == "unexpected_keyword_argument":
        known = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        return f"{key}: unknown name{did_you_mean(str(details['loc'][-1]), known)}"
    if details["type"] == "value_error":
        return f"{key}: {details['msg'].removeprefix('Value error, ')}"
    return f"{key}: found {json.dumps(details['input'])}, expected {details['msg'].removeprefix('Input should be ')}"


if __name__ == "__main__":
    print(json.dumps(faults(json.load(sys.stdin))))
