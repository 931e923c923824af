"""Two ranks with the stand-in for Transformer Engine: its layers against transformers, exports, and checkpoints and
handoffs that do not depend on which layers compute. Arguments: JSON out, JSON of what to do, folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import checkpoint_worker
import family_worker
import torch
import torch.distributed as dist

from or1_megatron.config.schema import ModelConfig, ParallelConfig
from or1_megatron.parallel import network
from or1_megatron.parallel.check_parity import measure_on_ranks
from or1_megatron.parallel.mesh import Mesh, SubWorld, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.network import Network, build_network
from or1_megatron.sizing.parallel_layouts import ChosenLayers


def without_a_gpu(parallel: ParallelConfig, dtype: str) -> ChosenLayers:
    return ChosenLayers("own" if parallel.layers == "own" else "transformer_engine", "")


def built(model: Path, mesh: Mesh, **layout: Any) -> Network:
    return build_network(ModelConfig(hf=model, dtype="float32"), ParallelConfig(ranks=2, tensor=2, **layout), mesh)


def switches(folder: Path, store: dist.Store) -> dict[str, Any]:
    """Return what the modules of a layer were told, by parameter name where it is about a parameter."""
    start_process_group(60, SubWorld(2, store, str(folder / "switches")))
    parallel = ParallelConfig(ranks=2, tensor=2, sequence=True)
    mesh = build_mesh(parallel, seed=1)
    try:
        # Overlap needs buffers on a GPU; what it asks of each linear does not.
        asked, network.start_tensor_overlap = network.start_tensor_overlap, lambda *_: None
        found = built(folder, mesh, sequence=True, overlap_tensor=True)
        network.start_tensor_overlap = asked
        layer = found.chunks[0].decoder.layers[0]
        linears = {
            "qkv": layer.self_attention.linear_qkv,
            "proj": layer.self_attention.linear_proj,
            "fc1": layer.mlp.linear_fc1,
            "fc2": layer.mlp.linear_fc2,
        }
        return {
            "parameters": {name: list(p.shape) for name, p in layer.named_parameters()},
            "state": sorted(layer.state_dict()),
            "norms summed over TP": sorted(
                name for name, p in layer.named_parameters() if getattr(p, "sequence_parallel", False)
            ),
            "cut": sorted(name for name, p in layer.named_parameters() if getattr(p, "tensor_model_parallel", False)),
            "overlaps": {name: sorted(k for k, on in m.overlaps.items() if on) for name, m in linears.items()},
            "buffers": {name: module.ub_name for name, module in linears.items()},
            "fused": {name: module.fuse_wgrad_accumulation for name, module in linears.items()},
        }
    finally:
        stop_process_group()


def handed_off(model: Path, store: dist.Store) -> dict[str, Any]:
    """Return whether both kinds of layers hold the same parts of the same HF tensors, and what differs."""
    start_process_group(60, SubWorld(2, store, str(model / "handoff")))
    try:
        mesh = build_mesh(ParallelConfig(ranks=2, tensor=2), seed=1)
        own, fused = (built(model, mesh, layers=layers).weights for layers in ("own", "auto"))
        held = [holding for holding in own.holdings() if mesh.rank in holding.ranks]
        return {
            "names": [name for name, _, _ in fused.metadata()],
            "same": own.metadata() == fused.metadata() and own.holdings() == fused.holdings(),
            "held": len(held),
            "differ": [h.name for h in held if not torch.equal(own.read(h.name, h.box), fused.read(h.name, h.box))],
        }
    finally:
        stop_process_group()


def main() -> None:
    out, plan, folder = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    network.choose_layers = without_a_gpu  # type: ignore[assignment]
    store, rank, _ = next(dist.rendezvous("env://"))
    told: dict[str, Any] = {"parity": {}}
    for name, model, layouts, exported in plan["parity"]:
        into = folder / name
        into.mkdir(exist_ok=True)
        task = {
            "model": {"hf": model, "dtype": "float32"},
            "layouts": layouts,
            "sequences": 12,
            "longest": 40,
            "seed": 1,
        }
        told["parity"][name] = {row["name"]: row for row in measure_on_ranks(task, name, store, rank)}
        for layout in exported:
            family_worker.export(Path(model), layout, into / layout.replace(" ", "_"), store, rank)
    told["handoff"] = handed_off(Path(plan["handoff"]), store)
    told["switches"] = switches(Path(plan["handoff"]), store)
    start_process_group(60, SubWorld(2, store, "travel"))
    told["travel"] = checkpoint_worker.travel(Path(plan["handoff"]), "float32", plan["travel"], folder / "travel")
    stop_process_group()
    if rank == 0:
        out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
