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


RECORDS = {"types", "config", "config_base", "config_algorithm", "config_stages", "interfaces"}
OURS = {
    **dict.fromkeys(RECORDS, RECORDS),
    "runtime": {"types", "schemas"},  # what it writes down, and the fields of it
    "weights": set(),
    "kernels": set(),
    "rl": RECORDS | {"runtime", "weights", "kernels"},
    "report": RECORDS | {"runtime", "schemas"},
}
"""Which of our top-level modules each of these may import, itself aside."""
LIBRARIES = {"weights": {"torch"}, "kernels": {"torch", "triton"}}


def test_what_the_lower_layers_import() -> None:
    """Lists of what is allowed, where the contracts list what is forbidden: what is added later must be let in here."""
    graph = grimp.build_graph("or1_megatron", include_external_packages=True, exclude_type_checking_imports=True)
    for name in OURS:
        package = f"or1_megatron.{name}"
        for module in graph.find_descendants(package) | {package}:
            for imported in graph.find_modules_directly_imported_by(module):
                ours, _, below = imported.partition(".")
                if ours == "or1_megatron":
                    assert below.split(".")[0] in OURS[name] | {name}, f"{module} imports {imported}"
                elif name in LIBRARIES and imported not in sys.stdlib_module_names:
                    assert imported in LIBRARIES[name], f"{module} imports {imported}"
