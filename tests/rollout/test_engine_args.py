"""Which arguments of vLLM's engine are let through; vLLM's own dataclasses are the oracle. No engine is started here:
tests/rollout/test_speculation.py samples from one. That each refused argument would do harm is not shown.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fixtures import TinyModel

from or1_megatron.config.base import ConfigError
from or1_megatron.config.schema import RolloutConfig
from or1_megatron.rollout import engine
from or1_megatron.rollout.engine_args import REFUSED, check_engine_args, faults, refusals
from or1_megatron.rollout.engine_pool import EngineError, EnginePool, engine_env

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def test_refused_are_arguments_of_vllm_and_all_that_an_engine_is_given_by_name() -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert set(REFUSED) <= {field.name for field in dataclasses.fields(EngineArgs)}
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(engine))) if isinstance(node, ast.Call)]
    (made,) = (call for call in calls if ast.unparse(call.func) == "LLM")
    given = {keyword.arg for keyword in made.keywords if keyword.arg is not None}
    assert "model" in given and given <= set(REFUSED)


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_config": NGRAM},
        {"speculative_config": None, "block_size": 16, "enforce_eager": False, "enable_chunked_prefill": False},
        {"compilation_config": {"cudagraph_mode": "FULL"}, "attention_config": {"backend": "FLASH_ATTN"}},
        {"cudagraph_capture_sizes": [1, 2, 4], "performance_mode": "throughput"},
    ],
)
def test_what_vllm_takes_is_let_through(arguments: dict[str, Any]) -> None:
    assert refusals(arguments) == {} and faults(arguments) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"enforce_eagre": True}, r"enforce_eagre: vLLM's engine has no such argument; did you mean enforce_eager"),
        ({"block_size": "16"}, r'block_size: found "16", expected a valid integer'),
        ({"performance_mode": "fast"}, r"performance_mode: found \"fast\", expected 'balanced', 'interactivity' or"),
        (
            {"compilation_config": {"cudagraph_modes": 1}},
            r"compilation_config.cudagraph_modes: unknown name; did you",
        ),
        (
            {"speculative_config": NGRAM | {"prompt_lookup": 4}},
            r"speculative_config.prompt_lookup: unknown name; did",
        ),
        (
            {"speculative_config": NGRAM | {"prompt_lookup_min": 5}},
            r"speculative_config: prompt_lookup_min=5 must be",
        ),
        ({"speculative_config": {"method": "ngram"}}, r"speculative_config: num_speculative_tokens must be provided"),
    ],
)
def test_what_vllm_would_not_take_is_named(arguments: dict[str, Any], line: str) -> None:
    (found,) = faults(arguments)
    assert re.match(rf"rollout\.engine_args\.{line}", found), found


def test_drafts_of_a_model_are_refused() -> None:
    (found,) = refusals({"speculative_config": {"method": "eagle", "model": "a"}}).values()
    assert 'speculative_config.method: found "eagle", expected one of ngram, suffix: a model that drafts' in found


def test_engines_do_not_start_with_what_is_refused(tmp_path: Path) -> None:
    config = RolloutConfig(kv_cache_bytes=1 << 20, engine_args={"seed": 3})
    with pytest.raises(EngineError, match=r"engine_args.seed: refused: each request has a seed of its own"):
        EnginePool(config, tmp_path, "float32", 64, "none", on_cpu=True)


def test_all_faults_are_found_in_one_pass() -> None:
    check_engine_args(RolloutConfig(engine_args={}))
    arguments = {"quantization": "fp8", "block_size": 1.5, "max_model_length": 4, "speculative_config": {"model": "a"}}
    with pytest.raises(ConfigError) as error:
        check_engine_args(RolloutConfig(engine_args=arguments))
    lines = str(error.value).splitlines()
    assert len(lines) == 4 and all(line.startswith("rollout.engine_args.") for line in lines), lines
    assert "quantization: refused: the policy's log-probs are compared with the engine's" in lines[0]
    assert "block_size: found 1.5, expected a valid integer" in lines[2]
    assert "max_model_length: vLLM's engine has no such argument; did you mean max_model_len" in lines[3]


def test_what_an_engine_on_a_gpu_is_given(tiny_model: TinyModel) -> None:
    """vLLM takes it; logits are fp32; a trainer's 60 GiB on a GPU of 80 do not prevent a restart. No GPU is asked."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.utils import request_memory

    config = RolloutConfig(kv_cache_bytes=1 << 30, tensor_parallel=2)
    settings = engine.EngineSettings(0, tiny_model.folder, "bfloat16", 64, config)
    options = engine._device_options(settings, is_cpu=False)
    assert faults(options) == []
    assert options["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}
    made = EngineArgs(str(tiny_model.folder), dtype="bfloat16", hf_overrides=options["hf_overrides"])
    assert str(made.create_model_config().head_dtype) == "torch.float32"
    gpu = SimpleNamespace(total_memory=80 << 30, free_memory=20 << 30, device_="cuda:0")
    request_memory(gpu, SimpleNamespace(gpu_memory_utilization=options["gpu_memory_utilization"]))
    with pytest.raises(ValueError, match="Free memory"):
        request_memory(gpu, SimpleNamespace(gpu_memory_utilization=config.gpu_memory_fraction))


def test_the_environment_of_an_engine_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's products of fp32 are in IEEE's arithmetic, and vLLM's caches on the node, unless said otherwise."""
    from triton import knobs
    from vllm import envs

    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    for name, value in engine_env(RolloutConfig(), (), on_cpu=False).items():
        monkeypatch.setenv(name, value)
    assert knobs.language.fp32_default == "ieee"
    assert Path(envs.VLLM_CACHE_ROOT).parent == Path(tempfile.gettempdir())
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/fast")
    assert engine_env(RolloutConfig(), (), on_cpu=False)["VLLM_CACHE_ROOT"] == "/fast"
