"""Who may import what: the contracts of pyproject.toml, and that the algorithm stands without the engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]

IMPORT_RL_BARE = """
import sys
for name in ("megatron", "vllm", "ray", "transformers"):
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
import importlib, pkgutil
import or1_megatron.rl
for module in pkgutil.walk_packages(or1_megatron.rl.__path__, "or1_megatron.rl."):
    importlib.import_module(module.name)
"""


def test_rl_imports_without_megatron_vllm_and_ray() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_RL_BARE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_weights_and_kernels_stand_on_torch_alone() -> None:
    """An allow-list, where the contracts are lists of what is forbidden: a new library must be let in here by hand."""
    graph = grimp.build_graph("or1_megatron", include_external_packages=True, exclude_type_checking_imports=True)
    allowed = {"or1_megatron.weights": {"torch"}, "or1_megatron.kernels": {"torch", "triton"}}
    for package, libraries in allowed.items():
        for module in graph.find_descendants(package) | {package}:
            for imported in graph.find_modules_directly_imported_by(module):
                if imported.startswith("or1_megatron") or imported in sys.stdlib_module_names:
                    continue
                assert imported in libraries, f"{module} imports {imported}"
