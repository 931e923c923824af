"""The choice of layers where Transformer Engine is whole, broken or absent. CUDA is claimed, not there.

Not proven: that a Transformer Engine which imports also computes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.sizing.parallel_layouts import LayersUnavailable, choose_layers, why_no_transformer_engine

SWALLOWS = "try:\n    from . import pytorch\nexcept ImportError:\n    pass\n"  # as the package's own __init__ does
AUTO, ASKED = ParallelConfig(), ParallelConfig(layers="transformer_engine")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package transformer_engine without a PyTorch part, on a machine that says it has CUDA."""
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    (folder / "__init__.py").write_text(SWALLOWS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.syspath_prepend(str(tmp_path))
    why_no_transformer_engine.cache_clear()
    before = dict(sys.modules)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine" and name not in before]:
        del sys.modules[name]
    why_no_transformer_engine.cache_clear()


def test_a_whole_one_is_chosen_for_bfloat16(package: Path) -> None:
    (package / "pytorch.py").write_text("")
    assert choose_layers(AUTO, "bfloat16") == ("transformer_engine", "")
    assert choose_layers(ASKED, "bfloat16").kind == "transformer_engine"
    assert choose_layers(AUTO, "float32") == ("own", "")
    assert choose_layers(ParallelConfig(layers="own"), "bfloat16") == ("own", "")


@pytest.mark.parametrize(
    "broken",
    ["import no_such_library_here", "raise OSError('libcudnn.so.9: cannot open')", "assert False, 'versions differ'"],
)
def test_a_broken_one_is_not(package: Path, broken: str) -> None:
    (package / "pytorch.py").write_text(broken)
    if "import" not in broken:  # only an ImportError passes the package's __init__
        (package / "__init__.py").write_text("")
    kind, warning = choose_layers(AUTO, "bfloat16")
    assert kind == "own"
    assert "layers is auto" in warning
    assert any(word in warning for word in ("no_such_library_here", "libcudnn.so.9", "versions differ"))
    with pytest.raises(LayersUnavailable, match=r"layers is 'transformer_engine'.*cannot be imported.*auto or own"):
        choose_layers(ASKED, "bfloat16")
    with pytest.raises(ImportError):
        import transformer_engine  # noqa: F401  # Megatron, which survives this error alone, must not find it


def test_an_absent_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kind, warning = choose_layers(AUTO, "bfloat16")
    assert kind == "own"
    assert "transformer-engine is not installed" in warning
    with pytest.raises(LayersUnavailable, match="not installed"):
        choose_layers(ASKED, "bfloat16")


def test_without_cuda_there_is_nothing_to_warn_of() -> None:
    assert choose_layers(AUTO, "bfloat16") == ("own", "")


def test_megatron_starts_beside_a_broken_one(tmp_path: Path) -> None:
    """Megatron alone ends on it: it expects no error but ImportError."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("raise OSError('libtransformer_engine.so: broken')")

    def start(code: str) -> subprocess.CompletedProcess[str]:
        prepared = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
        return subprocess.run([sys.executable, "-c", prepared], capture_output=True, text=True)

    assert "libtransformer_engine.so: broken" in start("import megatron.core.transformer.attention").stderr
    done = start("import or1_megatron.parallel.layers")
    assert done.returncode == 0, done.stderr
