"""tools/setup.sh with small stand-ins for Python, pip and uv on the PATH: what is chosen, refused, made anew and said.

Not shown: that the locks install. `.ci/run` does that from a fresh clone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    "bash", "cat", "chmod", "cp", "cut", "df", "dirname", "du", "env", "grep", "id", "ln", "mkdir", "mktemp", "paste",
    "rm", "sed", "sha256sum", "sleep", "sort", "tail", "timeout", "touch", "tr", "xargs",
)  # fmt: skip
# A Python of version $VERSION that notes its calls. Its pip installs by making the folder of a package.
PYTHON = """#!/usr/bin/env bash
venv=$(dirname "$(dirname "$0")") site=$(dirname "$(dirname "$0")")/lib/python3/site-packages
echo "${NVTE_NO_LOCAL_VERSION:+as released: }$*" >>"$SAID"
case "$*" in
  *version_info*) echo "@VERSION@" ;;
  --version) echo "Python @VERSION@.0" ;;
  "-m venv "*)
    [ -z "${NO_VENV:-}" ] || { echo "ensurepip is not available" >&2; exit 1; }
    mkdir -p "$3/bin" "$3/lib/python3/site-packages/pip.dist-info"
    touch "$3/lib/python3/site-packages/pip.dist-info/INSTALLER"
    cp "$0" "$3/bin/python"
    printf '#!/bin/sh\\necho doctor >>"$SAID"; exit ${DOCTOR:-0}\\n' >"$3/bin/or1"
    chmod +x "$3/bin/or1" ;;
  *"index versions torch"*--index-url*) echo "Available versions: 2.13.0${INDEX_TORCH:-}" ;;
  *"index versions torch"*) echo "Available versions: 2.13.0${LOCAL_TORCH:-}" ;;
  *"pip show"*) cat "$venv/torch" 2>/dev/null || exit 1 ;;
  *"pip install"*"${FAILS:-nothing fails}"*)
    mkdir -p "$site/half-1.dist-info" "$TMPDIR/pip-unpack"
    echo "[Errno 28] No space left on device" >&2
    exit 1 ;;
  *"pip install"*torch==2.13.0+cpu*) echo "Version: 2.13.0+cpu" >"$venv/torch" ;;
  *get_path*include*) echo "${HEADERS:-/none}" ;;
  *get_path*purelib*) echo "$site" ;;
  "- "*) cat >/dev/null; [ -z "${DRIVER_SAYS:-}" ] || echo "$DRIVER_SAYS" >&2; exit "${DRIVER:-3}" ;;
esac
"""


class Machine:
    """A clone on a machine whose PATH has only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.bin, self.home = folder / "clone", folder / "bin", folder / "home"
        (self.clone / "tools").mkdir(parents=True)
        self.bin.mkdir()
        self.home.mkdir()
        for name in TOOLS:
            (self.bin / name).symlink_to(str(shutil.which(name)))
        shutil.copy(ROOT / "tools/setup.sh", self.clone / "tools")
        shutil.copytree(ROOT / "requirements", self.clone / "requirements")
        shutil.copy(ROOT / "pyproject.toml", self.clone)
        self.said = folder / "said"
        self.said.touch()

    def program(self, path: Path, body: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
        path.chmod(0o755)
        return path

    def python(self, version: str, path: str | Path | None = None) -> Path:
        return self.program(Path(path) if path else self.bin / f"python{version}", PYTHON.replace("@VERSION@", version))

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.said.write_text("")
        env = {"PATH": str(self.bin), "HOME": str(self.home), "SAID": str(self.said), **environment}
        command = [str(self.bin / "bash"), "tools/setup.sh", *arguments]
        return subprocess.run(command, cwd=self.clone, env=env, capture_output=True, text=True, check=False)

    def installed(self) -> list[str]:
        """Return what pip was asked for in the last set-up."""
        calls = [line for line in self.said.read_text().splitlines() if "pip install" in line]
        return [call.split("--no-warn-script-location ")[1] for call in calls]


def lock(name: str) -> list[str]:
    return re.findall(r"^[^#\n]+$", (ROOT / "requirements" / name).read_text(), re.MULTILINE)


def pins(calls: list[str]) -> list[str]:
    """Return what calls of pip installed, in their order, each without what it depends on."""
    return [pin for call in calls for pin in call.removeprefix("--no-deps ").split()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_second_set_up_does_nothing(machine: Machine) -> None:
    machine.python("3.12")
    first = machine.setup()
    assert first.returncode == 0, first.stderr
    assert "with PyPI's torch" in first.stderr and "6.5 GB" in first.stderr
    *packages, own = machine.installed()
    assert pins(packages) == lock("cpu.lock") and own == "--no-deps --no-build-isolation -e ."
    assert machine.setup().returncode == 0
    assert machine.installed() == []
    with (machine.clone / "requirements/cpu.lock").open("a") as file:
        file.write("# changed\n")
    machine.setup()
    assert machine.installed() != []


def test_a_cpu_build_of_torch_is_taken_where_there_is_one(machine: Machine) -> None:
    machine.python("3.12")
    done = machine.setup(LOCAL_TORCH="+cpu")
    assert "the CPU build of torch that pip finds" in done.stderr and "2.1 GB" in done.stderr
    assert machine.installed()[0] == "--no-deps torch==2.13.0+cpu"
    without = [pin for pin in lock("cpu.lock") if not pin.startswith(("nvidia-", "cuda-"))]
    assert pins(machine.installed()[1:-1]) == without and "torch==2.13.0" in without
    shutil.rmtree(machine.clone / ".venv")
    assert "torch from PyTorch's CPU index" in machine.setup(INDEX_TORCH="+cpu").stderr
    assert machine.installed()[0] == "--no-deps torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu"
    assert pins(machine.installed()[1:-1]) == without


def test_pythons_that_are_found(machine: Machine) -> None:
    """Behind a shim that fails, in pyenv's and in uv's folders; 3.12 first."""
    machine.program(
        machine.bin / "python3.12", "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
    )
    machine.python("3.11", machine.bin / "python3")
    uv = machine.python("3.13", machine.home / ".local/share/uv/python/cpython-3.13.1-linux/bin/python3")
    done = machine.setup()
    assert f"({uv})" in done.stderr and "pyenv:" not in done.stderr
    pyenv = machine.python("3.12", machine.home / ".pyenv/versions/3.12.1/bin/python3")
    shutil.rmtree(machine.clone / ".venv")
    assert f"({pyenv})" in machine.setup().stderr


def test_uv_is_asked_last(machine: Machine) -> None:
    machine.python("3.10", machine.bin / "python3")
    python = machine.home / ".local/share/uv/python/cpython-3.12.9-linux/bin/python3"
    source = machine.python("3.12", machine.home / "to be downloaded")
    uv = machine.program(
        machine.bin / "uv", f'#!/usr/bin/env bash\nmkdir -p "{python.parent}"\ncp "{source}" "{python}"\n'
    )
    assert f"({python})" in machine.setup().stderr
    shutil.rmtree(machine.clone / ".venv")
    shutil.rmtree(python.parent)
    uv.write_text("#!/usr/bin/env bash\necho 'error: no route to the server' >&2\nexit 2\n")
    done = machine.setup()
    assert done.returncode == 1
    for part in (
        "Python 3.12 or 3.13 is needed",
        ".pyenv/versions",
        "no route to the server",
        "apt install",
        "PYTHON=",
    ):
        assert part in done.stderr
    assert not (machine.clone / ".venv").exists()


def test_a_named_python_is_taken_or_refused(machine: Machine) -> None:
    machine.python("3.12")
    old, new = machine.python("3.11"), machine.python("3.13", machine.home / "my python")
    done = machine.setup(PYTHON=str(old))
    assert done.returncode == 1
    assert f"PYTHON={old} is Python 3.11; 3.12 3.13 are what the tests run on" in done.stderr
    assert "does not start" in machine.setup(PYTHON="/no/such/python").stderr
    machine.setup()
    done = machine.setup(PYTHON=str(new))
    assert f".venv anew: it has Python 3.12, and PYTHON={new} has 3.13" in done.stderr
    assert done.returncode == 0


def test_an_environment_of_an_old_python_is_made_anew(machine: Machine) -> None:
    (machine.clone / ".venv").mkdir()
    machine.python("3.11", machine.clone / ".venv/bin/python")
    (machine.clone / ".venv/.installed").write_text("cpu with another key")
    no_python = machine.setup()
    assert no_python.returncode == 1
    assert (machine.clone / ".venv/bin/python").exists()  # nothing better is at hand
    machine.python("3.12")
    done = machine.setup()
    assert done.returncode == 0 and "making .venv anew: it has Python 3.11" in done.stderr


def test_a_full_disk_then_the_same_command(machine: Machine) -> None:
    machine.python("3.12")
    done = machine.setup(FAILS="ray==")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and "are free here" in done.stderr
    packages = machine.clone / ".venv/lib/python3/site-packages"
    assert (packages / "half-1.dist-info").exists()
    done = machine.setup()
    assert done.returncode == 0 and "creating" not in done.stderr
    assert not (packages / "half-1.dist-info").exists() and (packages / "pip.dist-info").exists()
    assert not (machine.clone / ".venv/tmp").exists()


def test_a_venv_that_was_cut_short_is_made_anew(machine: Machine) -> None:
    machine.python("3.12")
    done = machine.setup(NO_VENV="1")
    assert done.returncode == 1
    assert "ensurepip is not available" in done.stderr and "apt install python3.12-venv" in done.stderr
    machine.python("3.12", machine.clone / ".venv/bin/python")
    done = machine.setup()
    assert done.returncode == 0 and "did not finish making it" in done.stderr


def test_gpu_set_up(machine: Machine) -> None:
    machine.python("3.12")
    machine.program(machine.bin / "c++", "#!/bin/sh\n")
    (machine.home / "Python.h").touch()
    gpu = {"DRIVER": "0", "HEADERS": str(machine.home)}
    done = machine.setup("gpu", **gpu)
    assert done.returncode == 0, done.stderr
    *packages, engine, own = machine.installed()
    assert pins(packages) == lock("gpu.lock")
    assert engine == "--no-deps --no-build-isolation -r requirements/transformer_engine.lock"
    # pip refuses a build whose version has this clone's commit in it
    assert re.search(rf"^as released: .*{re.escape(engine)}$", machine.said.read_text(), re.MULTILINE)
    assert own == "--no-deps --no-build-isolation -e ."
    assert machine.said.read_text().splitlines()[-1] == "doctor"
    machine.setup("gpu", **gpu)
    assert machine.installed() == [] and machine.said.read_text().splitlines()[-1] == "doctor"
    assert machine.setup("gpu", DOCTOR="1", **gpu).returncode == 1
    machine.setup()  # as each other target does: the environment stays one for GPUs
    assert machine.installed() == []
    assert "making .venv anew: it is for gpu, and cpu is wanted" in machine.setup("cpu").stderr


def test_without_transformer_engine(machine: Machine) -> None:
    machine.python("3.12")
    done = machine.setup("gpu", TE="0", DRIVER="0")
    assert done.returncode == 0 and "own layers, which are slower" in done.stderr
    assert not any("transformer_engine" in call for call in machine.installed())
    machine.setup()
    assert machine.installed() == []


@pytest.mark.parametrize("lacks", ["c++", "Python.h"])
def test_what_compiling_needs_is_checked_before_anything_is_downloaded(machine: Machine, lacks: str) -> None:
    machine.python("3.12")
    if lacks != "c++":
        machine.program(machine.bin / "c++", "#!/bin/sh\n")
    done = machine.setup("gpu", DRIVER="0")
    assert done.returncode == 1
    package = "g++" if lacks == "c++" else "python3.12-dev"
    assert f"apt install {package}" in done.stderr and "make gpu TE=0" in done.stderr
    assert machine.installed() == [] and not (machine.clone / ".venv").exists()


def test_a_machine_without_driver_can_make_the_environment(machine: Machine) -> None:
    """A cluster's login node: what or1 doctor misses there is not the environment's."""
    machine.python("3.12")
    done = machine.setup("gpu", TE="0", DOCTOR="1")
    assert done.returncode == 0 and "warning: no NVIDIA driver here" in done.stderr


def test_an_old_driver_stops_before_anything_is_downloaded(machine: Machine) -> None:
    machine.python("3.12")
    done = machine.setup("gpu", TE="0", DRIVER="1", DRIVER_SAYS="the NVIDIA driver offers CUDA 12.2")
    assert done.returncode == 1 and "offers CUDA 12.2" in done.stderr
    assert machine.installed() == [] and not (machine.clone / ".venv").exists()


def test_the_driver_check_with_a_driver_of_each_age(tmp_path: Path) -> None:
    """The program that setup.sh gives a bare Python, with a small libcuda.so.1 in the place of the driver's."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    text = (ROOT / "tools/setup.sh").read_text()
    program = text.split("<<'END'")[1].split("\n", 1)[1].split("\nEND\n")[0]
    answers = {}
    for version in (0, 12020, 13000):
        folder = tmp_path / str(version)
        folder.mkdir()
        if version:
            (folder / "c.c").write_text(f"int cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }}\n")
            subprocess.run([compiler, "-shared", "-o", folder / "libcuda.so.1", folder / "c.c"], check=True)
        env = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        command = [sys.executable, "-S", "-", "13.0.3.0"]
        done = subprocess.run(command, input=program, env=env, capture_output=True, text=True, check=False)
        answers[version] = (done.returncode, done.stderr)
    assert answers[13000] == (0, "")
    assert answers[12020][0] == 1 and "offers CUDA 12.2" in answers[12020][1] and "580 or newer" in answers[12020][1]
    assert answers[0][0] in (0, 3)  # 0 where this machine has a driver
    assert "torch" not in "".join(line for line in program.splitlines() if "import" in line)


def test_a_packed_environment_is_left_alone(machine: Machine) -> None:
    (machine.clone / ".venv").mkdir()
    (machine.clone / ".venv/.installed").write_text("packed 0123")
    assert machine.setup().returncode == 0
    assert machine.said.read_text() == ""
