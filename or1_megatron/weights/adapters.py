"""LoRA adapters: their weight table, derived from the model family's table, and their folders in peft's format.

A linear y = W x becomes y = W x + alpha / r * B (A x), with A [r, in] and B [out, r]. Every HF tensor has its own A and
B, named as in peft's files. If Megatron fuses several HF tensors to one linear, the A matrices are concatenated along
r, and the B matrices are laid out and cut like the linear's rows. So the code that moves weights also moves adapters.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from or1_megatron.weights.families import ModelError
from or1_megatron.weights.files import base_digest
from or1_megatron.weights.layout import Layout
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import Experts, HFConfig, ModelFamily, Row

_CONFIG: Final = "adapter_config.json"
_TENSORS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."  # of the names in a folder
_OTHER_SCALES: Final = ("use_rslora", "alpha_pattern")  # peft's keys
_BASE: Final = "base_digest"  # our key in the metadata of the tensors' file


@dataclass(frozen=True, slots=True)
class Stacked(Layout):
    """Concatenates ``count`` tensors [r, in] to [count * r, in]."""

    count: int

    def fuse(self, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
        return torch.cat(list(parts))

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        return list(whole.chunk(self.count))


class AdaptedRow(NamedTuple):
    """A linear with adapters."""

    linear: Row
    parts: tuple[int, ...]
    """Indices of the linear's HF tensors that have an adapter."""
    a: Row
    b: Row
    """The row of B, for all HF tensors of the linear. The part for a tensor without adapter is zero and in no file."""


class AdapterTable:
    """The weight table of a model's adapters. Like a ``ModelFamily``, it has ``rows``, ``shapes`` and ``experts``.

    Args:
        targets: ends of the HF names of the linears to adapt; if there are none, all linears are adapted.

    Raises:
        ModelError: a target names no linear; the message has the nearest names.
    """

    def __init__(self, family: ModelFamily, hf: HFConfig, rank: int, targets: Collection[str]) -> None:
        self.rank, self._family = rank, family
        linears = [row for row in family.rows(hf) if _is_linear(row)]
        modules = {_module(name) for row in linears for name in row.hf}
        last = sorted({module.rpartition(".")[2] for module in modules})
        self.targets = tuple(targets) or tuple(last)
        """The targets, in the form of peft's ``target_modules``."""
        if wrong := [target for target in self.targets if not any(_ends(module, target) for module in modules)]:
            ends = sorted({_last_two(module) for module in modules} | set(last))
            nearest = [name for target in wrong for name in get_close_matches(_last_two(target), ends, 2)]
            raise ModelError(
                f"model.lora.targets: no linear of a {family.architecture} ends in {', '.join(wrong)}; "
                f"{f'did you mean {", ".join(nearest)}? ' if nearest else ''}its linears are {', '.join(last)}"
            )
        self.adapted = [row for row in map(self._adapted, linears) if row.parts]
        base, self._shapes = family.shapes(hf), dict[str, tuple[int, ...]]()
        for adapted in self.adapted:
            self._shapes |= {
                name: (base[linear][0], rank) for linear, name in zip(adapted.linear.hf, adapted.b.hf, strict=True)
            }
            self._shapes |= dict.fromkeys(adapted.a.hf, (rank, base[adapted.linear.hf[0]][1]))
        self.names = {name for row in self.adapted for i in row.parts for name in _names(row.linear.hf[i])}
        """Names of the tensors in a folder of adapters."""
        self.sizes = Counter[tuple[int, bool, bool]]()
        """Number of weights in the adapters, by (layer, whether of an expert, whether tensor parallelism cuts them)."""
        for row in self.rows(hf):
            key = int(row.megatron.split(".")[2]), row.expert is not None, row.cut is not Cut.WHOLE
            self.sizes[key] += sum(math.prod(self._shapes[name]) for name in row.hf)

    def _adapted(self, row: Row) -> AdaptedRow:
        names, by_columns = [_names(name) for name in row.hf], row.cut is Cut.ROW
        parts = tuple(i for i, name in enumerate(row.hf) if any(_ends(_module(name), t) for t in self.targets))
        module, stack = row.megatron.removesuffix("weight") + "adapter.", Stacked(max(1, len(parts)))
        a = Row(tuple(names[i][0] for i in parts), (), module + "lora_A", Cut.ROW if by_columns else Cut.WHOLE, stack)
        b = Row(tuple(b for _, b in names), (), module + "lora_B", Cut.WHOLE if by_columns else row.cut, row.layout)
        return AdaptedRow(row, parts, replace(a, expert=row.expert), replace(b, expert=row.expert))

    def rows(self, hf: HFConfig) -> Iterator[Row]:
        for row in self.adapted:
            yield from (row.a, row.b)

    def shapes(self, hf: HFConfig) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def experts(self, hf: HFConfig) -> Experts | None:
        return self._family.experts(hf)

    def write(self, folder: Path, tensors: Mapping[str, Tensor], base: Path, alpha: float) -> None:
        """Write the adapters of the model in ``base`` to a new folder. Raises OSError, SafetensorError."""
        folder.mkdir()
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": self.rank}
        config |= {"lora_alpha": int(alpha) if alpha.is_integer() else alpha, "target_modules": list(self.targets)}
        (folder / _CONFIG).write_text(json.dumps({**config, "lora_dropout": 0.0, "bias": "none"}, indent=2) + "\n")
        named = {_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(named, folder / _TENSORS, metadata={"format": "pt", _BASE: base_digest(base)})

    def read(self, folder: Path, base: Path, alpha: float) -> Callable[[str], Tensor]:
        """Open a folder that ``write`` or peft wrote; return a function that returns a tensor by name.

        Raises:
            ModelError: the folder holds no adapters, or their base, rank, scale or linears are not the run's.
        """
        try:
            config = json.loads((folder / _CONFIG).read_text())
            file = safe_open(folder / _TENSORS, framework="pt")
            held = {name.removeprefix(_PREFIX): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            expected = f"expected {_CONFIG} and {_TENSORS}"
            raise ModelError(f"model.lora.adapter = {folder} is no folder of adapters ({error}); {expected}") from error
        ours = (("r", self.rank), ("lora_alpha", alpha))
        wrong = [
            f"{key} is {config.get(key)}, and the run's is {value}" for key, value in ours if config.get(key) != value
        ]
        if others := [key for key in _OTHER_SCALES if config.get(key)]:
            wrong.append(f"{', '.join(others)}: its scale is not lora_alpha / r everywhere")
        if (file.metadata() or {}).get(_BASE) not in (None, base_digest(base)):
            wrong.append(f"its base, {config.get('base_model_name_or_path')}, has other weights than {base}")
        shapes = {name: self._shapes[name] for name in self.names}
        if different := sorted(name for name in shapes.keys() | held.keys() if shapes.get(name) != held.get(name)):
            name = different[0]
            found = (
                f"the shape of {name} is {held.get(name, 'nothing')}, and the run's is {shapes.get(name, 'nothing')}"
            )
            wrong.append(f"{len(different)} tensors differ: {found}")
        if wrong:
            raise ModelError(f"model.lora.adapter = {folder} does not fit: {'; '.join(wrong)}")
        return lambda name: file.get_tensor(_PREFIX + name) if name in held else torch.zeros(self._shapes[name])


def _is_linear(row: Row) -> bool:
    """Return whether a row is the weight of a linear that tensor parallelism cuts; False for norms, routers,
    embeddings, convolutions and biases."""
    matrices = all(name.endswith(".weight") and len(axes) == 2 for name, axes in zip(row.hf, row.axes, strict=True))
    return matrices and row.cut not in (Cut.WHOLE, Cut.VOCABULARY)


def _module(weight: str) -> str:
    """Return a weight's module name, without an expert's number, so that a target means all experts of a layer."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", weight.removesuffix(".weight"))


def _ends(module: str, target: str) -> bool:
    return f".{module}".endswith(f".{target}")


def _last_two(module: str) -> str:
    return ".".join([part for part in module.split(".") if not part.isdigit()][-2:])


def _names(weight: str) -> tuple[str, str]:
    module = weight.removesuffix("weight")
    return f"{module}lora_A.weight", f"{module}lora_B.weight"
