"""Megatron's own loader reads converted checkpoints at any layout; checkpoints of others convert to the HF folder.

One start of two ranks does it all. Not proven here: Transformer Engine's layers, experts, ranks over several machines,
checkpoints of real Megatron-LM runs (with optimizer state and fp8's extra state).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from rich.console import Console
from safetensors.torch import load_file

from or1_megatron.config.load import resolved_yaml
from or1_megatron.config.schema import Config
from or1_megatron.convert.job import ConvertError
from or1_megatron.convert.to_hf import megatron_to_hf
from or1_megatron.convert.to_megatron import hf_to_megatron

QUIET = Console(quiet=True)
LAYOUTS = [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {}]


@pytest.fixture(scope="module")
def hf(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("layouts") / "hf", "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def told(hf: Path) -> Any:
    """Return what the ranks found; what they wrote lies beside ``hf``."""
    megatron = hf.with_name("megatron")
    hf_to_megatron(hf, megatron, QUIET, file_bytes=40_000)
    worker = str(Path(__file__).with_name("layouts_worker.py"))
    return ranks.run_json(worker, 2, hf.with_name("out.json"), str(hf), str(megatron), json.dumps(LAYOUTS))


def assert_same_tensors(a: Path, b: Path) -> None:
    mine, theirs = ({n: t for p in x.glob("*.safetensors") for n, t in load_file(p).items()} for x in (a, b))
    assert mine.keys() == theirs.keys()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])] == []


def test_megatron_loads_it_at_any_layout(told: Any) -> None:
    """Every parameter of both ranks is what the policy loads from the HF folder itself."""
    assert told == [[[] for _ in LAYOUTS]] * 2


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_a_runs_checkpoint(told: Any, hf: Path, number: int) -> None:
    """Parameters among masters and moments, cut as the layout cuts them; config and tokenizer from the run's base
    model; a card that says recipe, step and metrics, and not the base model's own."""
    run = hf.with_name(f"run_{number}")
    stage = {"name": "only", "steps": 5, "max_response_tokens": 96, "prompts_per_step": 8, "prompts_per_update": 8}
    config = {
        "run": {"dir": run},
        "model": {"hf": hf},
        "data": {"train": [{"path": "math.jsonl"}]},
        "stages": [{**stage, "group_size": 4}],
    }
    (run / "config.yaml").write_text(resolved_yaml(Config.model_validate(config)))
    rows = [{"step": 2, "evaluation/accuracy": 0.625}, {"step": 3, "accuracy/all": 0.5}, {"step": 4}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = hf.with_name(f"back_{number}")
    megatron_to_hf(run / "checkpoints" / "step_000003", out, QUIET, verify=True)
    assert_same_tensors(hf, out)
    assert (out / "config.json").read_text() == (hf / "config.json").read_text()
    assert (out / "tokenizer.json").read_text() == (hf / "tokenizer.json").read_text()
    card = (out / "README.md").read_text()
    assert card.startswith("---\nbase_model: hf\n") and str(hf.parent) not in card
    for said in ("Step 3 of 5", "| only | 5 | 96 | 8 | 8 | 4 |", "| evaluation/accuracy | 0.625 |", "after step 2"):
        assert said in card
    assert "| accuracy/all | 0.5 |" in card


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_what_megatron_lm_saves(told: Any, hf: Path, kind: str) -> None:
    """A torch_dist checkpoint of stock layers, its vocabulary padded; the folder above is as good as the checkpoint."""
    checkpoint = hf.with_name(f"plain_{kind}")
    out = hf.with_name(f"back_{kind}")
    with pytest.raises(ConvertError, match="does not say what model it is of"):
        megatron_to_hf(checkpoint, out, QUIET)
    megatron_to_hf(checkpoint, out, QUIET, hf=hf, verify=True)
    assert_same_tensors(hf, out)


def test_transformers_computes_the_same(told: Any, hf: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = hf.with_name("back_logits")
    megatron_to_hf(hf.with_name("plain_tensor"), out, QUIET, hf=hf)
    ids = torch.arange(60)[None]
    mine, theirs = (AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32)(ids).logits for x in (hf, out))
    assert torch.equal(mine, theirs)
