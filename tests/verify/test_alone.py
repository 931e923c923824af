"""The verifiers without the trainer: nothing heavy is imported, and ``pip install`` of the package alone suffices.

Not proven here: verdicts (test_math_verifier.py, test_code_corpus.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import or1_verify
from or1_verify import Message, Problem, Verdict, VerifyConfig, verify, verify_many
from or1_verify.config import read_config
from or1_verify.errors import UserError

PACKAGE = Path(or1_verify.__file__).parent
HEAVY = (
    "or1_megatron",
    "torch",
    "ray",
    "vllm",
    "megatron",
    "transformers",
    "numpy",
    "pyarrow",
    "typer",
    "rich",
    "psutil",
)
REFUSE = f"import sys\nsys.modules.update(dict.fromkeys({HEAVY}))  # importing one now raises ModuleNotFoundError\n"

TESTS = json.dumps({"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6\n"]})
PROGRAM = "</think>\n```python\nprint(int(input()) + 1)\n```"
ROWS = [
    {"prompt": "x + y?", "answer": "x+y", "response": r"</think> \boxed{y+x}", "status": "right"},
    {"prompt": "x + y?", "answer": "x+y", "response": r"</think> \boxed{y-x}", "status": "wrong"},
    {"prompt": "n + 1", "ability": "code", "answer": TESTS, "response": PROGRAM, "status": "right"},
    {"prompt": "n + 1", "ability": "code", "answer": TESTS, "response": PROGRAM.replace("1", "2"), "status": "wrong"},
]

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def judge(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run the command on the rows, which it must judge as they say."""
    given = [{key: value for key, value in row.items() if key != "status"} for row in ROWS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    done = subprocess.run(
        [*command, "rows.jsonl", "--out", "out.jsonl"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    judged = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [row["status"] for row in judged] == [row["status"] for row in ROWS]
    assert done.stdout.splitlines()[-1].split() == ["rows", "4", "0.500", "2", "2"]


@needs_bubblewrap
def test_the_command_and_its_processes_import_nothing_heavy(tmp_path: Path) -> None:
    """A copy of the package, beside a sitecustomize that all its Python processes load."""
    shutil.copytree(PACKAGE, tmp_path / "or1_verify")
    (tmp_path / "sitecustomize.py").write_text(REFUSE)
    environment = {"PYTHONPATH": str(tmp_path)}
    probe = [sys.executable, "-c", "import torch"]
    assert subprocess.run(probe, env={**os.environ, **environment}, capture_output=True, check=False).returncode == 1
    judge([sys.executable, "-m", "or1_verify"], tmp_path, environment)


@needs_bubblewrap
@pytest.mark.slow
def test_the_package_installs_alone_into_an_empty_environment(tmp_path: Path) -> None:
    """Needs an index that has the dependencies; ``pip check`` compares what is declared with what is there."""
    shutil.copytree(PACKAGE, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    needed = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    environment = {"PYTHONPATH": ""}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check", *arguments]
        return subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, cwd=tmp_path
        )

    fetched = pip("install", "-q", *needed["project"]["dependencies"], *needed["build-system"]["requires"])
    if fetched.returncode:
        pytest.skip(f"no index has the dependencies: {fetched.stderr[-200:]}")
    installed = pip("install", "-q", "--no-deps", "--no-build-isolation", "./source")
    assert installed.returncode == 0, installed.stderr
    assert pip("check").returncode == 0, pip("check").stdout
    names = {line.split("==")[0].lower().replace("_", "-") for line in pip("freeze", "--all").stdout.splitlines()}
    assert names & {"torch", "ray", "vllm", "megatron-core", "numpy"} == set()
    judge([str(tmp_path / "venv/bin/or1-verify")], tmp_path, environment)


def test_the_trainer_declares_what_the_verifiers_need() -> None:
    """Its wheel contains them, and their own pyproject.toml has no part in its installation."""
    alone, trainer = (tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (PACKAGE, PACKAGE.parent))
    assert set(alone["project"]["dependencies"]) <= set(trainer["project"]["dependencies"])


def test_one_answer_and_many() -> None:
    assert verify("math", '["12"]', r"</think> \boxed{12}").reward == 1.0
    assert verify("math", '["12"]', r"</think> \boxed{12}", truncated=True).status == "truncated"
    with pytest.raises(ValueError, match="expected a JSON list"):
        verify("math", "12", r"</think> \boxed{12}")
    with pytest.raises(ValueError, match=r"no verifier for ability \['chess'\]"):
        verify("chess", "e4", "e4")
    problems = [Problem("", "", "math", (Message("user", ""),), f'["x^{n}"]', {}, f"x:{n}") for n in range(2, 8)]
    attempts = [(problem, r"</think> \boxed{x^4}", n == 3) for n, problem in enumerate(problems)]
    verdicts = list(verify_many(attempts, VerifyConfig(workers=2, timeout_s=60.0)))
    assert [verdict.status for verdict in verdicts] == ["wrong", "wrong", "right", "truncated", "wrong", "wrong"]
    assert isinstance(verdicts[0], Verdict)


def test_settings_come_from_the_section_verify(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {hf: x}\nverify: {math: {rounding: true}, timeout_s: 2, checker_headers: /h}\n")
    assert read_config(file) == VerifyConfig(math={"rounding": True}, timeout_s=2.0, checker_headers=Path("/h"))
    file.write_text("run: {dir: x}\n")
    assert read_config(file) == read_config(None) == VerifyConfig()
    for text, words in {
        "verify: {timeout: 2}": "verify.timeout: Extra inputs are not permitted, found 2",
        "verify: {math: {judge: me}}": "verify.math.judge: Input should be 'own' or 'math_verify', found 'me'",
        "verify: {workers: '2'}": "verify.workers: Input should be a valid integer, found '2'",
        "base: or1_7b": "found a 'base', expected a whole configuration: the output of `or1 config",
        "[1]": "found no mapping",
        "a: [": "cannot be read as YAML",
    }.items():
        file.write_text(text)
        with pytest.raises(UserError) as caught:
            read_config(file)
        assert str(file) in str(caught.value) and words in str(caught.value)
    with pytest.raises(UserError, match=r"cannot be read as YAML: .*No such file"):
        read_config(tmp_path / "none.yaml")
