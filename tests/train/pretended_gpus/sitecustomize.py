"""Python runs this at its start in every process whose PYTHONPATH has this folder: torch.cuda then has pretended GPUs.

PRETENDED_GPUS holds their UUIDs, in CUDA's order. What a process sees of them follows CUDA_VISIBLE_DEVICES as CUDA's
programming guide has it: numbers, or UUIDs that may be cut short, up to the first entry that names no GPU.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from types import SimpleNamespace


def visible() -> list[str]:
    gpus = [name for name in os.environ.get("PRETENDED_GPUS", "").split(",") if name]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    found = []
    for entry in wanted.split(","):
        if entry.isdigit() and int(entry) < len(gpus):
            found.append(gpus[int(entry)])
        elif entry.startswith("GPU-") and len(named := [gpu for gpu in gpus if gpu.startswith(entry)]) == 1:
            found.append(named[0])
        else:
            break
    return found


def pretend(cuda):
    cuda.is_available = lambda: bool(visible())
    cuda.device_count = lambda: len(visible())
    cuda.get_device_properties = lambda number: SimpleNamespace(uuid=visible()[number].removeprefix("GPU-"))


class AfterTorchCuda(importlib.abc.MetaPathFinder):
    """Calls ``pretend`` once torch.cuda has been imported."""

    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_pretend(module):
            load(module)
            pretend(module)

        spec.loader.exec_module = load_and_pretend
        return spec


sys.meta_path.insert(0, AfterTorchCuda())
