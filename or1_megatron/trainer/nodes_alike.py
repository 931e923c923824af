"""Compares configuration, model files, data, code and packages between the nodes of a run before it trains."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

import or1_megatron
import or1_verify
from or1_megatron.config.resume import leaves
from or1_megatron.config.schema import Config
from or1_megatron.errors import AgreedError
from or1_megatron.parallel.mesh import start_process_group
from or1_megatron.runtime.versions import digest_of_code, versions
from or1_megatron.runtime.world import several_nodes

_BLOCKS: Final = 64
_BLOCK_BYTES: Final = 1 << 16
_SHOWN: Final = 20


class NodesDiffer(AgreedError):
    """The nodes of a run differ in configuration, models, data, code or packages. The message names the differences."""


def join_world(config: Config) -> None:
    """Join torchrun's process group, unless this rank has joined, and compare the nodes. A collective call.

    Raises:
        NodesDiffer: the nodes' ``facts`` differ. All ranks raise this error.
    """
    if dist.is_initialized():
        return
    start_process_group(config.cluster.verb_timeout_s)
    if several_nodes():
        compare(facts(config) if os.environ["LOCAL_RANK"] == "0" else None)


def compare(mine: Mapping[str, str] | None) -> None:
    """Raise NodesDiffer if the nodes' ``facts`` differ. A collective call. ``mine``: None unless local rank is 0."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine and (socket.gethostname(), mine))
    nodes = [node for node in everyone if node is not None]
    apart = differences([node for _, node in nodes], [f"node {i} ({host})" for i, (host, _) in enumerate(nodes)])
    if apart:
        more = [f"and {len(apart) - _SHOWN} more"] if len(apart) > _SHOWN else []
        lines = "\n  ".join([*apart[:_SHOWN], *more])
        raise NodesDiffer(f"the nodes of this run differ; start the same command, code and files on all:\n  {lines}")


def facts(config: Config) -> dict[str, str]:
    """Return the facts about this node, by name: configuration, package versions, digests of code, models, data."""
    found = {f"key {key}": value for key, value in leaves(config.model_dump(mode="json")).items()}
    found |= {f"package {name}": version for name, version in versions().items()}
    for package in (or1_megatron, or1_verify):
        found[f"code of {package.__name__}"] = digest_of_code(Path(package.__path__[0]))
    for folder in filter(None, (config.model.hf, config.algorithm.kl.reference)):
        for path in sorted(folder.iterdir() if folder.is_dir() else ()):
            if path.suffix in (".json", ".safetensors"):
                found[f"file {path}"] = fingerprint(path)
    sources = (*config.data.train, *config.evaluate.data)
    # Only rank 0 reads the data: other nodes need not have it.
    return found | {f"data {s.path}": fingerprint(Path(s.path)) for s in sources if Path(s.path).is_file()}


def differences(nodes: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """Return a sentence for each fact in which nodes differ.

    The sentence gives the most common value with its nodes, and each other value with its node.

    Args:
        nodes: the facts of each node.
        names: the nodes' names.
    """
    lines = []
    for key in sorted(set().union(*nodes)):
        values = {name: node.get(key, "nothing") for name, node in zip(names, nodes, strict=True)}
        if key.startswith("data "):
            values = {name: value for name, value in values.items() if value != "nothing"}
        usual = Counter(values.values()).most_common(1)[0][0]
        others = [f"{value} on {name}" for name, value in values.items() if value != usual]
        if others:
            where = ", ".join(name for name, value in values.items() if value == usual)
            lines.append(f"{key}: {usual} on {where}; {'; '.join(others)}")
    return lines


def fingerprint(path: Path) -> str:
    """Return a file's size and a digest of 64 blocks spread over it. Large weight files are not read whole."""
    size = path.stat().st_size
    last = max(0, size - _BLOCK_BYTES)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}):
            file.seek(start)
            digest.update(file.read(_BLOCK_BYTES))
    return f"{size:,} bytes, digest {digest.hexdigest()[:12]}"
