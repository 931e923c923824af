"""HF to Megatron and back, byte for byte; in between, each Megatron tensor as an oracle without the table makes it.
What a killed conversion left is replaced.

Not proven here: that Megatron's loader reads it at any layout and other writers' checkpoints (test_layouts), kills at
any moment, memory, speed, real models' files, and that a disk keeps what was synced when the power fails.
"""

from __future__ import annotations

import fcntl
import filecmp
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from typer.testing import CliRunner

from or1_megatron.checkpoint.manifest import CheckpointDamaged, check_manifest
from or1_megatron.commands.app import app
from or1_megatron.convert import rows
from or1_megatron.convert.job import ConvertError
from or1_megatron.convert.rows import megatron_tensors
from or1_megatron.convert.to_hf import megatron_to_hf
from or1_megatron.convert.to_megatron import hf_to_megatron
from or1_megatron.weights.families import FAMILIES, ModelError, family_of, read_hf_config
from or1_megatron.weights.stacked_experts import split

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def qwen2(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen2") / "hf", "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def converted(qwen2: Path) -> Path:
    out = qwen2.with_name("megatron")
    hf_to_megatron(qwen2, out, QUIET, file_bytes=40_000)
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def assert_same_folder(a: Path, b: Path) -> None:
    names, others = (sorted(str(path.relative_to(x)) for path in x.rglob("*") if path.is_file()) for x in (a, b))
    assert names == others
    assert filecmp.cmpfiles(a, b, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_there_and_back_byte_for_byte(architecture: str, make_model: Any, tmp_path: Path) -> None:
    """All files, the index and the model's card among them, through the command line."""
    hf = make_model(tmp_path / "hf", architecture)
    assert len(list(hf.glob("*.safetensors"))) > 1
    there = ["convert", "hf-to-megatron", "--hf", str(hf), "--out", str(tmp_path / "megatron")]
    back = ["convert", "megatron-to-hf", "--megatron", str(tmp_path / "megatron"), "--out", str(tmp_path / "back")]
    for command in (there, back):
        ended = CliRunner().invoke(app, command)
        assert ended.exit_code == 0, ended.output
    assert_same_folder(hf, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "megatron"]


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_rows_go_where_the_layouts_put_them(architecture: str, make_model: Any, tmp_path: Path) -> None:
    """Row by row as ``Layout.fuse`` makes them of the tensors."""
    hf = make_model(tmp_path / "hf", architecture)
    config, found = read_hf_config(hf), split(tensors(hf))
    family = family_of(config)
    for row, made in zip(family.rows(config), megatron_tensors(family, config), strict=True):
        parts = [found[name] for name in row.hf]
        whole = torch.full(made.shape, torch.nan, dtype=parts[0].dtype)
        for part, source in zip(parts, made.sources, strict=True):
            for run in source.runs:
                whole[run.row : run.row + run.rows] = part[run.hf_row : run.hf_row + run.rows]
        assert torch.equal(whole, row.layout.fuse(parts, config)), row.megatron


def test_what_torch_reads(qwen2: Path, converted: Path) -> None:
    """torch's own loader finds each whole tensor, stacked over layers, put together here without the table: a key/value
    group's two query heads, its key, its value; gate above up. Heads are 16 wide, two of four to a group."""
    found = _load_state_dict_from_keys(storage_reader=FileSystemReader(converted))
    hf = tensors(qwen2)
    layers = [f"model.layers.{i}." for i in range(4)]

    def qkv(layer: str, kind: str) -> torch.Tensor:
        q, k, v = (hf[f"{layer}self_attn.{x}_proj.{kind}"] for x in "qkv")
        return torch.cat([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]])

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([hf[layer + name] for layer in layers])

    gates = [torch.cat([hf[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")]) for layer in layers]
    norms = {
        "input_layernorm.weight": stacked("input_layernorm.weight"),
        "pre_mlp_layernorm.weight": stacked("post_attention_layernorm.weight"),
    }
    expected = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.layers.self_attention.linear_qkv.weight": torch.stack([qkv(x, "weight") for x in layers]),
        "decoder.layers.self_attention.linear_qkv.bias": torch.stack([qkv(x, "bias") for x in layers]),
        "decoder.layers.self_attention.linear_proj.weight": stacked("self_attn.o_proj.weight"),
        "decoder.layers.mlp.linear_fc1.weight": torch.stack(gates),
        "decoder.layers.mlp.linear_fc2.weight": stacked("mlp.down_proj.weight"),
        "decoder.layers.input_layernorm.weight": norms["input_layernorm.weight"],
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": norms["input_layernorm.weight"],
        "decoder.layers.pre_mlp_layernorm.weight": norms["pre_mlp_layernorm.weight"],
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": norms["pre_mlp_layernorm.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    flat = _flat(found)
    assert sorted(flat) == sorted(expected)
    assert [name for name, tensor in expected.items() if not torch.equal(flat[name], tensor)] == []
    check_manifest(converted)


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    flat = {}
    for name, value in nested.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat


def test_tied_models(make_model: Any, tmp_path: Path) -> None:
    """Without an output layer in the files, and with one; one that differs is refused."""
    hf = make_model(tmp_path / "hf", "Qwen2ForCausalLM", tie_word_embeddings=True)
    for name, head in {"without": None, "with": "same", "other": "other"}.items():
        folder = shutil.copytree(hf, tmp_path / name)
        if head is not None:
            found = tensors(folder)
            extra = found["model.embed_tokens.weight"].clone()
            extra[3, 3] = extra[3, 3] if head == "same" else -0.5
            for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
                path.unlink()
            save_file(
                {**found, "lm_head.weight": extra},
                folder / "model.safetensors",
                metadata={"format": "pt", **dict.fromkeys("zyxabc", "")},
            )
        if head == "other":
            with pytest.raises(ModelError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
                hf_to_megatron(folder, tmp_path / "never", QUIET)
            continue
        hf_to_megatron(folder, tmp_path / f"{name}_megatron", QUIET)
        megatron_to_hf(tmp_path / f"{name}_megatron", tmp_path / f"{name}_back", QUIET)
        assert_same_folder(folder, tmp_path / f"{name}_back")


def test_other_dtypes_and_file_sizes(qwen2: Path, converted: Path, tmp_path: Path) -> None:
    """bf16 widened to fp32 on the way there comes back the same; on the way back it is what transformers loads."""
    from transformers import AutoModelForCausalLM

    hf_to_megatron(qwen2, tmp_path / "wide", QUIET, dtype=torch.float32)
    megatron_to_hf(tmp_path / "wide", tmp_path / "narrow", QUIET)
    assert_same_folder(qwen2, tmp_path / "narrow")
    out = tmp_path / "fp32"
    plain = shutil.copytree(converted, tmp_path / "plain")
    (plain / "conversion_record.json").unlink()  # as a checkpoint that was not converted
    (plain / "manifest.json").unlink()
    megatron_to_hf(plain, out, QUIET, hf=qwen2, dtype=torch.float32, shard_bytes=100_000)
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    assert len(sizes) >= 4 and max(sizes) < 110_000
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found, source = tensors(out), tensors(qwen2)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert {n: f for f in set(index["weight_map"].values()) for n in load_file(out / f)} == index["weight_map"]
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in source.items()) and len(found) == len(
        source
    )
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    half = sum(tensor.nbytes for tensor in source.values()) * 2 // 3
    megatron_to_hf(plain, tmp_path / "two", QUIET, hf=qwen2, shard_bytes=half)
    assert len(list((tmp_path / "two").glob("*.safetensors*"))) == 3  # two, and their index
    ids = torch.arange(60)[None]
    logits = [AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32)(ids).logits for x in (qwen2, out)]
    assert torch.equal(*logits)


def test_rows_are_put_together_from_several_chunks(
    qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is written in pieces of about 20 rows, and read in pieces of whole tensors."""
    with monkeypatch.context() as small:
        small.setattr(rows, "PIECE_BYTES", 2500)
        hf_to_megatron(qwen2, tmp_path / "megatron", QUIET)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", QUIET)
    assert_same_folder(qwen2, tmp_path / "back")


def damaged(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "damaged")


def test_what_is_wrong_with_an_hf_folder_is_named(qwen2: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = damaged(qwen2, tmp_path)
    file = next(folder.glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=f"{file.name} is no safetensors file, or cut: it has .* bytes"):
        hf_to_megatron(folder, out, QUIET)
    file.unlink()
    with pytest.raises(ModelError, match=f"{file.name} is missing"):
        hf_to_megatron(folder, out, QUIET)
    file.write_bytes(whole)
    found = load_file(file)
    name = next(name for name in found if name.endswith(("k_proj.weight", "up_proj.weight")))
    save_file({**found, name: found[name].float()}, file, metadata={"format": "pt"})
    with pytest.raises(ConvertError, match=f"{name}.* are of several dtypes, and Megatron holds them as one tensor"):
        hf_to_megatron(folder, out, QUIET)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT9"]}))
    ended = CliRunner().invoke(app, ["convert", "hf-to-megatron", "--hf", str(folder), "--out", str(out)])
    assert ended.exit_code == 2 and "architecture GPT9 is not supported; known:" in ended.output
    assert not out.exists()


def test_what_is_wrong_with_a_checkpoint_is_named(converted: Path, tmp_path: Path) -> None:
    """A missing, a cut, and an altered file; no record of the model; no checkpoint at all."""
    out = tmp_path / "out"
    with pytest.raises(ConvertError, match=r"no \.metadata; expected a Megatron checkpoint"):
        megatron_to_hf(tmp_path, out, QUIET)
    folder = damaged(converted, tmp_path)
    file = folder / "__0_1.distcp"
    whole = file.read_bytes()
    file.unlink()
    with pytest.raises(CheckpointDamaged, match=r"__0_1\.distcp is missing"):
        megatron_to_hf(folder, out, QUIET)
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointDamaged, match=r"__0_1\.distcp has \d+ bytes; the manifest says"):
        megatron_to_hf(folder, out, QUIET)
    (folder / "manifest.json").rename(tmp_path / "manifest.json")
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConvertError, match=r"__0_1\.distcp is cut"):
        megatron_to_hf(folder, out, QUIET)
    (tmp_path / "manifest.json").rename(folder / "manifest.json")
    altered = bytearray(whole)
    altered[len(whole) // 2] ^= 1
    file.write_bytes(altered)
    with pytest.raises(CheckpointDamaged, match=r"__0_1\.distcp is corrupt"):
        megatron_to_hf(folder, out, QUIET)
    file.write_bytes(whole)
    (folder / "conversion_record.json").unlink()
    (folder / "manifest.json").unlink()
    with pytest.raises(ConvertError, match=r"does not say what model it is of; .* with --hf"):
        megatron_to_hf(folder, out, QUIET)
    assert not out.exists()
    megatron_to_hf(folder, out, QUIET, hf=folder / "hf")
    assert len(tensors(out)) == 4 * 12 + 3


def test_the_output_is_looked_at_first(qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConvertError, match="there exists already"):
        hf_to_megatron(qwen2, tmp_path / "there", QUIET)
    free = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(ConvertError, match=r"67,[0-9,]+ bytes are needed there and 1,048,576 are free"):
        hf_to_megatron(qwen2, tmp_path / "full", QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_a_killed_conversion_left_is_replaced(qwen2: Path, converted: Path, tmp_path: Path) -> None:
    """Its unfinished folder is emptied, unless another conversion is writing it."""
    aside, back = tmp_path / "back.partial", tmp_path / "back"
    (aside / "hf").mkdir(parents=True)
    (aside / "model-00009-of-00009.safetensors").write_text("torn")
    lock = os.open(aside, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ConvertError, match="another conversion is writing"):
        megatron_to_hf(converted, back, QUIET)
    os.close(lock)
    megatron_to_hf(converted, back, QUIET)
    assert_same_folder(qwen2, back)
    assert not aside.exists()
