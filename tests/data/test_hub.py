"""Sets by their hub id: ``datasets`` and huggingface_hub as they are, and a server that speaks the hub's protocol.

Not proven here: the hub itself, gated sets, and that the known sets' columns are today what they were.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hub_server import COMMIT, serving_hub
from rows_as_published import livecodebench, skywork

ROOT = Path(__file__).parents[2]

CARD = b"""---
configs:
- config_name: default
  data_files:
  - {split: math, path: data/math-*}
  - {split: code, path: data/code-*}
---
"""
TWO_SUBSETS = b"""---
configs:
- config_name: easy
  data_files:
  - {split: math, path: easy/math.parquet}
- config_name: hard
  data_files:
  - {split: math, path: hard/math.parquet}
---
"""

READ = """
import json, sys
from pathlib import Path
from or1_megatron.data.pipeline.recipe import BuildSource
from or1_megatron.data.pipeline.normalise import published_rows
from or1_megatron.data.problems import load_problems, read_rows
from or1_verify.problems.rows import DataError
from or1_megatron.evaluate.benchmarks import load_set

def said(make):
    try:
        return make()
    except DataError as error:
        return str(error)

SET = "Skywork/Skywork-OR1-RL-Data"
NONE = Path("none")
if sys.argv[1] == "hub":
    found = {
        "math": said(lambda: [p.ground_truth for p in load_problems(Path(SET), split="math")]),
        "code": said(lambda: [origin for origin, _ in published_rows(BuildSource(path=Path(SET), split="code"))]),
        "hard": said(lambda: [origin for origin, _ in read_rows(Path("someone/graded"), "math", "hard")]),
        "no split": said(lambda: list(read_rows(Path(SET)))),
        "wrong split": said(lambda: list(read_rows(Path(SET), "physics"))),
        "wrong subset": said(lambda: list(read_rows(Path("someone/graded"), "math", "other"))),
        "no such set": said(lambda: list(read_rows(Path("nobody/nothing")))),
        "aime24": said(lambda: [p.messages[0].content[:15] for p in load_set("aime24", NONE).problems]),
        "livecodebench": said(lambda: [[p.origin, p.ability] for p in load_set("livecodebench", NONE).problems]),
        "release": said(lambda: str(load_set("livecodebench", NONE))),
        "gsm8k": said(lambda: [p.ground_truth for p in load_set("gsm8k", NONE).problems]),
    }
else:
    found = {
        "math": said(lambda: [p.ground_truth for p in load_problems(Path(SET), split="math")]),
        "no such set": said(lambda: list(read_rows(Path("nobody/nothing")))),
        "livecodebench": said(lambda: load_set("livecodebench", NONE)),
    }
print(json.dumps(found))
"""


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def numbered(number: int, ability: str = "math") -> dict[str, Any]:
    truth = json.dumps([str(number)]) if ability == "math" else json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    return skywork(f"Number {number}, please.", ability=ability, reward_model={"ground_truth": truth, "style": "rule"})


def line(number: int) -> bytes:
    return json.dumps(livecodebench(f"Double it, {number}.")).encode() + b"\n"


REPOSITORIES = {
    "Skywork/Skywork-OR1-RL-Data": {
        "README.md": CARD,
        "data/math-00000-of-00002.parquet": parquet([numbered(1), numbered(2)]),
        "data/math-00001-of-00002.parquet": parquet([numbered(3)]),
        "data/code-00000-of-00001.parquet": parquet([numbered(4, "code")]),
    },
    "someone/graded": {
        "README.md": TWO_SUBSETS,
        "easy/math.parquet": parquet([numbered(5), numbered(6)]),
        "hard/math.parquet": parquet([numbered(7)]),
    },
    "HuggingFaceH4/aime_2024": {
        "README.md": b"---\nlicense: mit\n---\n",
        "data/train-00000-of-00001.parquet": parquet(
            [{"id": 60, "problem": "What is 1 + 1?", "solution": "2", "answer": "2", "url": "", "year": "2024"}]
        ),
    },
    "openai/gsm8k": {
        "README.md": (
            b"---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: test, path: main/test.parquet}\n"
            b"- config_name: socratic\n  data_files:\n  - {split: test, path: socratic/test.parquet}\n---\n"
        ),
        "main/test.parquet": parquet([{"question": "Much?", "answer": "It is <<2*500=1000>>1000.\n#### 1,000"}]),
        "socratic/test.parquet": parquet([{"question": "Other?", "answer": "#### 2"}]),
    },
    "livecodebench/code_generation_lite": {
        "README.md": b"",
        "code_generation_lite.py": b"raise SystemExit('a loading script was run')",
        "test.jsonl": line(1),
        "test2.jsonl": line(2),
    },
}


def read(endpoint: str, home: Path, how: str, **more: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "300")
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", READ, how], env={**environment, **more}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_sets_by_their_hub_id_and_again_without_the_hub(tmp_path: Path) -> None:
    """Configurations and splits as the card says; LiveCodeBench, which has a loading script, by its files; then from
    the cache alone, and what was never loaded is said to be unreachable."""
    with serving_hub(REPOSITORIES) as endpoint:
        found = read(endpoint, tmp_path, "hub")
    assert found["math"] == ['["1"]', '["2"]', '["3"]']
    assert found["code"] == ["Skywork/Skywork-OR1-RL-Data[code]:1"]
    assert found["hard"] == ["someone/graded[math]:1"]
    assert "has splits math, code; expected one of them as 'split'" in found["no split"]
    assert 'Unknown split "physics"' in found["wrong split"]
    assert "'other' not found. Available: ['easy', 'hard']" in found["wrong subset"]
    assert found["no such set"].startswith("nobody/nothing: no such file or folder here")
    assert found["aime24"] == ["What is 1 + 1? "]
    name = "livecodebench/code_generation_lite"
    assert found["livecodebench"] == [[f"{name}/test.jsonl:1", "code"], [f"{name}/test2.jsonl:1", "code"]]
    assert found["release"] == "livecodebench: 2 problems of release_v2"
    assert found["gsm8k"] == ['["1000"]']
    again = read("http://127.0.0.1:9", tmp_path, "cache", HF_HUB_OFFLINE="1")
    assert again["math"] == found["math"]
    assert "from the Hugging Face hub (HF_HUB_OFFLINE is set)" in again["no such set"]
    assert "hf download --repo-type dataset nobody/nothing" in again["no such set"]
    assert f"{COMMIT}: give that path if they are all there" in again["livecodebench"]
