"""Names and views of the parts of a tensor that holds all experts of a layer, as gpt-oss's files store them.

In the weight table, ``NAME[e, p::n]`` means one matrix [out, in] of expert e. It is made of entry e of the tensor NAME
[experts, in, n * out]: every n-th column from p on, transposed. A bias tensor is [experts, n * out], a bias part [out].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_PART = re.compile(r"(.+)\[(\d+), (\d+)::(\d+)\]")


class Part(NamedTuple):
    """One expert's part of a stack, the tensor that holds all experts of a layer."""

    stack: str
    expert: int
    first: int
    step: int

    def __str__(self) -> str:
        return f"{self.stack}[{self.expert}, {self.first}::{self.step}]"

    def of(self, entry: Tensor) -> Tensor:
        """Return this part as a view [out, in] (or [out]) of the expert's entry [in, step * out] (or [step * out])."""
        return entry[..., self.first :: self.step].t()


def part_of(name: str) -> Part | None:
    """Return the part that a name means; None for the name of a whole tensor."""
    match = _PART.fullmatch(name)
    return Part(match[1], *map(int, match.groups()[1:])) if match else None


def in_files(name: str) -> str:
    """Return the name, in an HF folder's files, of the tensor that holds the table's tensor ``name``."""
    return name.partition("[")[0]


def loaded_as(name: str) -> str:
    """Return the name under which vLLM loads ``name``. For a part, it is the name of the expert's whole stack entry."""
    return re.sub(r"\.experts\.(\w+)\[(\d+), .*", r".experts.\2.\1", name)


def file_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Turn the shapes of the table's tensors into shapes of the files' tensors, by name, in the table's order."""
    found = {}
    for name, shape in shapes.items():
        part = part_of(name)
        found[in_files(name)] = shape if part is None else (part.expert + 1, *shape[1:], part.step * shape[0])
    return found


def split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the files' tensors the table's names. Stacks that have biases (gpt-oss's) are divided into parts."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name or f"{name.removesuffix('_bias')}_bias" not in tensors:
            found[name] = tensor
            continue
        step = 2 if "gate_up" in name else 1
        parts = [Part(name, expert, first, step) for expert in range(len(tensor)) for first in range(step)]
        found |= {str(part): part.of(tensor[part.expert]) for part in parts}
    return found


def joined(
    tensors: Iterable[tuple[str, Tensor | None]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the files' (name, tensor), joined from the table's ``tensors`` in order. ``shapes``: by ``file_shapes``."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if (part := part_of(name)) is None:
            yield name, tensor
            continue
        if tensor is not None:
            if part.stack not in made:
                made[part.stack] = torch.empty(shapes[part.stack], dtype=tensor.dtype)
            part.of(made[part.stack][part.expert]).copy_(tensor)
        if (part.expert + 1, part.first + 1) == (shapes[part.stack][0], part.step):
            yield part.stack, made.pop(part.stack, None)
