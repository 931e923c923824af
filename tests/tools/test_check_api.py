"""Our calls into vLLM, Ray, Megatron-Core and Transformer Engine, against the sources of these packages.

The normal run reads the installed ones, whose Python is that of the GPU environment; Transformer Engine is not among
them. The slow one reads the wheels that requirements/gpu.lock and transformer_engine.lock name.

Not proven: what a call does; and of objects whose class cannot be told, anything.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tools import check_api, gpu_lock

INSTALLED = Path(sysconfig.get_path("purelib"))

MUTANTS = {
    "parallel/model.py": [
        ("vp_stage=index", "virtual_stage=index", "'virtual_stage'"),  # an argument of a constructor of theirs
        ("calculate_per_token_loss=True", "per_token_loss=True", "'per_token_loss'"),  # a field of a dataclass
        ("self.shared_embedding_or_output_weight()", "self.shared_output_weight()", "'shared_output_weight'"),
    ],
    "parallel/mesh.py": [("import parallel_state", "import parallel_states", "parallel_states does not exist")],
    "rollout/engine.py": [
        ("prompt_logprobs=0", "prompt_log_probs=0", "'prompt_log_probs'"),  # a field of a Struct
        ("max_num_seqs=", "max_sequences=", "'max_sequences'"),  # passed on by **kwargs
        ('"enable_sleep_mode"', '"enable_sleep"', "'enable_sleep'"),  # in a dict of arguments
        ("self._llm.wake_up(tags=", "self._llm.wake_up(labels=", "'labels'"),  # of a method
        ("engine_core.abort_requests(", "engine_core.abort_request(", "'abort_request'"),  # of a hinted object
    ],
    "rollout/client.py": [("timeout=timeout_s)", "time_limit=timeout_s)", "'time_limit'")],
    "handoff/vllm/receiver.py": [("def receive_weights(", "def take_weights(", "lacks")],  # an abstract method
}
"""Per file: what is replaced, by what, and a part of the problem that must be reported."""


def test_the_installed_packages_have_what_we_call() -> None:
    report = check_api.check([INSTALLED])
    assert report.problems == set()
    libraries = {library for library in check_api.LIBRARIES if (INSTALLED / library).is_dir()}
    assert {"vllm", "ray", "megatron"} <= libraries
    assert len(report.checked) > 400  # 478 when this was written: the reader still understands our code


def test_renamed_names_are_found(tmp_path: Path) -> None:
    shutil.copytree(check_api.ROOT / check_api.OURS, tmp_path / check_api.OURS)
    for name, changes in MUTANTS.items():
        path = tmp_path / check_api.OURS / name
        text = path.read_text()
        for before, after, _ in changes:
            assert before in text, (name, before)
            text = text.replace(before, after, 1)
        path.write_text(text)
    problems = check_api.check([INSTALLED], tmp_path).problems
    for name, changes in MUTANTS.items():
        for _, after, said in changes:
            assert any(name in problem and said in problem for problem in problems), (name, after, problems)


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The Python files of the wheels that the GPU locks name, one folder per wheel. Skips without a package index.

    300 MB are loaded, into pytest's cache folder, where they are found again.
    """
    wheels = check_api.ROOT / ".pytest_cache/gpu_wheels"
    versions = gpu_lock.read_lock("gpu.lock") | gpu_lock.read_lock("transformer_engine.lock")
    names = [f"{name}=={versions[name]}" for name in ("vllm", "ray", "megatron-core", "transformer-engine")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(wheels),
    ]
    for platform in ("manylinux_2_31", "manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        command += ["--platform", f"{platform}_x86_64"]
    done = subprocess.run([*command, "--python-version", "3.12", *names], capture_output=True, text=True)
    if done.returncode:
        assert "from versions: none" in done.stderr, done.stderr  # an index that answers, and lacks what the locks name
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    folders = []
    for requirement in names:
        stem = requirement.replace("==", "-").replace("megatron-core", "megatron_core")
        wheel = next(wheels.glob(f"{stem.replace('transformer-engine', 'transformer_engine')}-*.whl"))
        folders.append(tmp_path_factory.mktemp("wheel"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folders[-1], [name for name in archive.namelist() if name.endswith(".py")])
            if requirement.startswith("vllm"):  # what the doctor imports to see whether the libraries load
                assert "vllm/_C_stable_libtorch.abi3.so" in archive.namelist()
    return folders


@pytest.mark.slow
def test_the_locked_packages_have_what_we_call(locked: list[Path]) -> None:
    """vLLM for CUDA, Ray and Megatron-Core as GPU machines install them, and Transformer Engine."""
    report = check_api.check(locked)
    assert report.problems == set()
    assert all(any((folder / library).is_dir() for folder in locked) for library in check_api.LIBRARIES)
    seen = " ".join(what for _, what in report.checked)
    assert "TEDotProductAttention" in seen
