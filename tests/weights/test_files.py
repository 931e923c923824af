"""Which files of a folder are the model, with folders as people publish and keep them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from or1_megatron.convert.hf_folder import HFWeights
from or1_megatron.parallel.weights import HFTensors
from or1_megatron.weights.families import ModelError, read_hf_config
from or1_megatron.weights.files import INDEX, check_weight_files, weight_files


def check(folder: Path) -> None:
    check_weight_files(folder, read_hf_config(folder))


@pytest.fixture
def folder(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("qwen2"), tmp_path / "model"))


def shard(folder: Path) -> dict[str, torch.Tensor]:
    """Put the tensors into two files with an index; return them."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return tensors


def test_only_the_files_of_the_index_count(folder: Path) -> None:
    """Older shards, another writer's whole model and an optimizer's state lie beside them, with other numbers."""
    tensors = shard(folder)
    wrong = {name: tensor + 1 for name, tensor in tensors.items()}
    for name in ("model-00001-of-00003.safetensors", "zz-backup.safetensors", "consolidated.safetensors"):
        save_file(wrong, folder / name)
    save_file({"exp_avg": torch.zeros(3)}, folder / "optimizer.safetensors")
    check(folder)
    ours, converted = HFTensors(folder, read_hf_config(folder)), HFWeights(folder)
    for name, tensor in tensors.items():
        assert ours.get(name).equal(tensor)
        assert converted.rows(name, 0, len(tensor)).equal(tensor)


def test_mistrals_own_file_is_no_part_of_the_model(folder: Path) -> None:
    save_file({"tok_embeddings.weight": torch.zeros(3)}, folder / "consolidated.safetensors")
    assert weight_files(folder) == [folder / "model.safetensors"]
    check(folder)


def test_what_cannot_be_the_model_is_refused(folder: Path) -> None:
    whole = folder / "model.safetensors"
    kept = whole.read_bytes()
    shard(folder)
    whole.write_bytes(kept)
    with pytest.raises(ModelError, match=r"which transformers reads, and .*, whose files vLLM reads"):
        check(folder)
    (folder / INDEX).unlink()
    check(folder)  # model.safetensors is the model, as transformers reads it
    whole.unlink()
    with pytest.raises(ModelError, match="expected it in one file"):
        save_file(load_file(folder / "model-00001-of-00002.safetensors"), folder / "other.safetensors")
        check(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    whole.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n")
    with pytest.raises(ModelError, match=r"Git LFS pointer.*hf download"):
        check(folder)


def test_a_folder_without_a_model_says_what_it_holds(folder: Path) -> None:
    """An adapter beside its base's config.json, PyTorch's own file, and a folder of the hub's cache."""
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"lacks model.safetensors or its index; .* merge the adapter into its base"):
        check(folder)
    (folder / "adapter_model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"it holds config.json, .*pytorch_model.bin"):
        check(folder)
    (folder / "cached" / "snapshots").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"config.json is missing; .* it holds snapshots$"):
        read_hf_config(folder / "cached")


def test_quantised_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"the weights are quantised: {name} is of dtype F8_E4M3"):
        check(folder)


def test_a_tied_model_with_another_output_layer(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("qwen2", tie_word_embeddings=True), tmp_path / "tied"))
    tensors = load_file(folder / "model.safetensors")
    output = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": output}, folder / "model.safetensors")
    check(folder)
    output[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": output}, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"ties word embeddings, but lm_head\.weight is not model\.embed_tokens\.weight"
    ):
        check(folder)
