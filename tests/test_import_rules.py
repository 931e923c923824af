"""Tests the import contracts of pyproject.toml, and that ``rl`` can be imported without Megatron, vLLM and Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tools.allowed_imports import AllowedImports

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


@pytest.mark.parametrize(
    ("imports", "problems"),
    [
        ([("house.roof", "house.wall"), ("house.roof.tile", "clay"), ("house.roof.tile", "json")], []),
        ([("house.wall", "house.roof")], ["wall imports house.roof, which the entry 'wall' does not list"]),
        ([("house.wall", "clay")], ["wall imports clay, which the entry 'wall' does not list"]),
        (
            [("house.roof.vent", "house.wall")],
            ["roof.vent imports house.wall, which the entry 'roof.vent' does not list"],
        ),
        ([("house.cellar", "house.wall")], ["cellar has no entry"]),
    ],
)
def test_what_breaks_the_list(imports: list[tuple[str, str]], problems: list[str]) -> None:
    """The import graph is made by hand; that import-linter reads sources correctly is not tested."""
    graph = grimp.ImportGraph()
    graph.add_module("house")
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported)
    allowed = ["roof: wall | clay", "roof.vent:", "wall:"]
    contract = AllowedImports("by hand", {"root_packages": ["house"]}, {"allowed": allowed})
    assert contract.check(graph, verbose=False).metadata["problems"] == problems
