"""Packing a small environment and unpacking it elsewhere, by the programs that a user runs.

Not shown: that a GPU environment works where it is unpacked.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tools.pack_environment import Choice, pack, problem_of_environment

PACKAGES = ("mpmath", "PyYAML", "Pygments", "packaging")
"""Pure and compiled ones; Pygments has a program."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project under git with a .venv of a few packages and the project itself, as pip leaves them."""
    root = tmp_path_factory.mktemp("packing machine") / "clone"
    venv.create(root / ".venv")
    (site,) = (root / ".venv/lib").glob("python3*/site-packages")
    for name in PACKAGES:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(distribution.locate_file(file)), target)
    program = root / ".venv/bin/pygmentize"
    # pip's two ways to begin; the long one where the path has a blank
    long = f"#!/bin/sh\n'''exec' \"{root}/.venv/bin/python\" \"$0\" \"$@\"\n' '''\n"
    program.write_text(long + program.read_text().split("\n", 1)[1])
    short = program.with_name("short")
    short.write_text(f"#!{root.parent}/python3\nimport yaml\nprint(yaml.__file__)\n")
    short.chmod(0o755)
    info = site / "or1_megatron-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: or1-megatron\nVersion: 1\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n../../../bin/short,,\n__editable__.or1_megatron.pth,,\n")
    (site / "__editable__.or1_megatron.pth").write_text(str(root))
    (root / "or1_megatron").mkdir()
    (root / "or1_megatron/__init__.py").write_text("WHERE = __file__")
    (root / "configs").symlink_to("or1_megatron")
    (root / "run.log").write_text("not tracked")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "or1_megatron", "configs"], cwd=root, check=True)
    return root


@pytest.fixture(scope="module")
def packed(clone: Path) -> Path:
    pack(clone, clone.parent / "packed", 200_000)
    return clone.parent / "packed"


@pytest.fixture
def carried(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "carried"))


def unpack(carried: Path, folder: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "PYTHON": python}
    command = ["sh", str(carried / "unpack.sh"), str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def installed(site: Path, name: str, file: str, content: str) -> None:
    """Put a package of version 1 with one file where a Python looks for packages."""
    info = f"{name.replace('-', '_')}-1.dist-info"
    texts = {file: content, f"{info}/METADATA": f"Name: {name}\nVersion: 1\n", f"{info}/RECORD": f"{file},,\n"}
    for path, text in texts.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def told(folder: Path, program: str) -> str:
    """Run a program in the unpacked environment, with no variable of this one's."""
    command = [str(folder / ".venv/bin/python"), "-c", program]
    return subprocess.run(command, env={}, cwd="/", capture_output=True, text=True, check=True).stdout.strip()


def test_an_environment_goes_to_another_folder_and_python(clone: Path, carried: Path, tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in carried.glob("part_*")]
    assert len(sizes) > 3 and max(sizes) <= 200_000
    folder = tmp_path / "the target"
    clone.rename(clone.with_name("away"))  # nothing may be read from where it was packed
    try:
        done = unpack(carried, folder, str(Path(sys.executable).resolve()))
        assert done.returncode == 0, done.stderr
        assert told(folder, "import or1_megatron; print(or1_megatron.WHERE)") == f"{folder}/or1_megatron/__init__.py"
        versions = (
            "import mpmath, yaml; from importlib.metadata import version as v; print(v('PyYAML'), v('or1-megatron'))"
        )
        assert told(folder, versions) == f"{importlib.metadata.version('PyYAML')} 1"
        assert told(folder, "import yaml; print(yaml.__with_libyaml__)") == "True"
        program = [str(folder / ".venv/bin/pygmentize"), "-V"]
        short = subprocess.run([str(folder / ".venv/bin/short")], env={}, capture_output=True, text=True, check=True)
        assert short.stdout.startswith(f"{folder}/.venv/")
        assert "Pygments version" in subprocess.run(program, env={}, capture_output=True, text=True, check=True).stdout
    finally:
        clone.with_name("away").rename(clone)
    assert (folder / "configs/__init__.py").exists() and not (folder / "run.log").exists()
    named = [path for path in folder.rglob("*") if path.is_file() and str(clone.parent).encode() in path.read_bytes()]
    assert named == []


def test_every_bad_part_is_named_at_once_and_the_same_command_goes_on(carried: Path, tmp_path: Path) -> None:
    expected = {part["name"]: part["sha256"] for part in json.loads((carried / "manifest.json").read_text())["parts"]}
    flipped, missing = carried / "part_001", carried / "part_002"
    whole, kept = flipped.read_bytes(), missing.read_bytes()
    flipped.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    missing.unlink()
    folder = tmp_path / "target"
    done = unpack(carried, folder)
    assert done.returncode != 0 and not folder.exists()
    for name, what in (("part_001", "is damaged"), ("part_002", "is missing")):
        (line,) = (line for line in done.stderr.splitlines() if name in line)
        assert what in line and expected[name] in line
    assert "part_000" not in done.stderr
    flipped.write_bytes(whole)
    missing.write_bytes(kept)
    assert "is ready" in unpack(carried, folder).stdout


def test_an_interrupted_unpacking_goes_on_and_a_second_one_does_nothing(carried: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    unpack(carried, folder)
    (site,) = (folder / ".venv/lib").glob("python3*/site-packages")
    cut, gone, whole = site / "mpmath/ctx_mp.py", site / "yaml/loader.py", site / "yaml/reader.py"
    length, inode = cut.stat().st_size, whole.stat().st_ino
    (folder / ".venv/.installed").unlink()
    cut.write_bytes(cut.read_bytes()[:100])
    gone.unlink()
    assert "is ready" in unpack(carried, folder).stdout
    assert cut.stat().st_size == length and gone.exists()
    assert whole.stat().st_ino == inode  # what was there stays
    gone.unlink()
    assert "already" in unpack(carried, folder).stdout
    assert not gone.exists()


def test_what_the_target_has_is_left_out(clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A package of the same version, or without one, is taken from the target's Python; another version is packed. What
    the target lacks is named. Its CUDA libraries lie where torch looks for them, beside those that were carried."""
    version = importlib.metadata.version("mpmath")
    lines = [f"mpmath=={version}", "pyyaml==0.1", "nvidia-thing", "-e git+https://host/x", "elsewhere==1"]
    carried, target, folder = tmp_path / "carried", tmp_path / "python", tmp_path / "target"
    (packing,) = (clone / ".venv/lib").glob("python3*/site-packages")
    library, carried_library = "nvidia/cu13/lib/libthing.so.13", "nvidia/cu13/lib/libother.so"
    installed(packing, "nvidia-thing", library, "new")
    installed(packing, "nvidia-other", carried_library, "carried")
    manifest = pack(clone, carried, 10**8, Choice(lines))
    assert manifest["left_out"] == [f"mpmath=={version}", "nvidia-thing==1"]
    assert "pyyaml: the target has 0.1" in capsys.readouterr().out
    venv.create(target)
    (site,) = (target / "lib").glob("python3*/site-packages")
    refused = unpack(carried, folder, str(target / "bin/python"))
    assert refused.returncode == 1 and not folder.exists()
    assert f"mpmath=={version}, nvidia-thing==1" in refused.stderr
    installed(site, "mpmath", "mpmath.py", "")
    installed(site, "nvidia-thing", library, "old")
    assert unpack(carried, folder, str(target / "bin/python")).returncode == 0
    assert told(folder, "import mpmath; print(mpmath.__file__)") == str(site / "mpmath.py")
    assert told(folder, "import yaml; print(yaml.__file__)").startswith(str(folder))
    (unpacked,) = (folder / ".venv/lib").glob("python3*/site-packages")
    assert [(unpacked / each).read_text() for each in (library, carried_library)] == ["old", "carried"]


def test_what_nobody_needs_is_not_packed_and_a_line_that_names_nothing_is_refused(clone: Path, tmp_path: Path) -> None:
    pack(clone, tmp_path / "carried", 10**8, Choice(without=["# a remark", "Pygments", "yaml/[r-s]*.py  # in part"]))
    assert unpack(tmp_path / "carried", tmp_path / "target").returncode == 0
    (site,) = (tmp_path / "target/.venv/lib").glob("python3*/site-packages")
    assert not (site / "pygments").exists()
    assert sorted(path.name for path in (site / "yaml").glob("[p-t]*.py")) == ["parser.py", "tokens.py"]
    with pytest.raises(SystemExit, match=r"\.venv: no-package, yaml/nothing\*$"):
        pack(clone, tmp_path / "again", 10**8, Choice(without=["no-package", "yaml/nothing*", "yaml/reader.py"]))


def test_the_project_alone_is_packed_anew(clone: Path, carried: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in carried.glob("part_*")}
    (clone / "or1_megatron/__init__.py").write_text("WHERE = __file__  # changed")
    manifest = pack(clone, carried, 200_000, Choice(project_only=True))
    kept = [part["name"] for part in manifest["parts"][: manifest["environment"]]]
    assert len(kept) == len(before) - 1 and all((carried / name).read_bytes() == before[name] for name in kept)
    assert unpack(carried, tmp_path / "target").returncode == 0
    assert "changed" in (tmp_path / "target/or1_megatron/__init__.py").read_text()
    assert told(tmp_path / "target", "import yaml; print(yaml.__with_libyaml__)") == "True"


def test_an_environment_that_is_not_the_locked_one_is_refused(clone: Path) -> None:
    assert "no whole .venv for GPUs" in problem_of_environment(clone)
    (clone / ".venv/.installed").write_text("gpu-without-te 123 /somewhere")
    problem = problem_of_environment(clone)
    assert "torch missing instead of 2." in problem and "mpmath" not in problem


def test_another_version_of_python_is_refused(carried: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    (carried / "unpack.sh").write_text((carried / "unpack.sh").read_text().replace(" python3;", f" {old};"))
    done = unpack(carried, tmp_path / "target", str(old))
    assert done.returncode == 1
    assert f"is for Python {sys.version_info[0]}.{sys.version_info[1]}" in done.stderr
