"""mbridge makes the same Megatron tensors of the same HF folder. Skipped where pip cannot get it.

Not proven here: other families than Qwen2, and what mbridge does on the way back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from or1_megatron.convert.to_megatron import hf_to_megatron

SCRIPT = """
import sys
from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.mesh import build_mesh, start_process_group
import torch
from pathlib import Path
from safetensors.torch import load_file
from mbridge import AutoBridge

hf, out = Path(sys.argv[1]), sys.argv[2]
weights = {n: t for path in hf.glob("*.safetensors") for n, t in load_file(path).items()}
start_process_group(60)
build_mesh(ParallelConfig(), seed=1)
bridge = AutoBridge.from_pretrained(hf)
names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
kinds = ("self_attention.linear_proj.weight", "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias", "mlp.linear_fc1.weight",
    "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc2.weight")
names += [f"decoder.layers.{layer}.{kind}" for layer in range(4) for kind in kinds]
made = {}
for name in names:
    parts = [weights[x] for x in bridge._weight_name_mapping_mcore_to_hf(name)]
    made[name] = bridge._weight_to_mcore_format(name, parts)
torch.save(made, out)
"""


@pytest.mark.slow
def test_mbridge_makes_the_same_tensors(make_model: Any, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = ["install", "-q", "--no-deps", "--target", str(packages), "mbridge==0.15.1"]
    if subprocess.run([sys.executable, "-m", "pip", *install], capture_output=True, timeout=300).returncode:
        pytest.skip("pip cannot get mbridge")
    hf, out = make_model(tmp_path / "hf", "Qwen2ForCausalLM"), tmp_path / "mbridge.pt"
    environment = {**os.environ, "PYTHONPATH": f"{ranks.ROOT}:{packages}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCRIPT, str(hf), str(out)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    theirs = torch.load(out)
    hf_to_megatron(hf, tmp_path / "megatron", Console(quiet=True))
    dcp_to_torch_save(tmp_path / "megatron", tmp_path / "ours.pt")
    ours = flat(torch.load(tmp_path / "ours.pt"))
    assert len(theirs) == 3 + 4 * 7
    for name, tensor in theirs.items():
        parts = name.split(".")
        layer = int(parts.pop(2)) if parts[:2] == ["decoder", "layers"] else None
        mine = ours[".".join(parts)]
        assert torch.equal(tensor, mine if layer is None else mine[layer]), name


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for name, value in nested.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found
