"""RolloutStore writes in the background, keeps to its bytes, and reads back what was written.

Not proven here: a network file system, or the size of a 32B step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from waiting import wait_until

from or1_megatron.runtime import rollout_store
from or1_megatron.runtime.files import DiskFullError
from or1_megatron.runtime.rollout_store import RolloutStore, delete_oldest, read_rollouts, rollout_files, to_table
from or1_megatron.schemas.fields import ROLLOUT
from or1_megatron.types import AdvantagedGroup, Completion, Group, Prompt, TokenScores, VersionSpan
from or1_verify.types import Message, Problem, Verdict


def make_group(name: str, rewards: tuple[float, ...], tokens: int = 5) -> Group:
    problem = Problem(name, "train-math-x", "math", (Message("user", f"Compute {name}."),), '["7"]', {}, "file:1")
    prompt = Prompt(problem, np.array([1, 2, 3], np.int32))
    completions = tuple(
        Completion(
            problem_id=name,
            sample_index=i,
            token_ids=np.arange(tokens + i, dtype=np.int32),
            log_probs=np.full(tokens + i, -0.5 * (i + 1), np.float32),
            text=f"<think>{i}</think> 7",
            finish_reason="stop" if reward else "length",
            versions=(VersionSpan(3, 0), VersionSpan(4, 2)) if i == 1 else (VersionSpan(3, 0),),
            engine=i % 2,
            seed=(1 << 40) + i,
            started_s=100.0,
            finished_s=100.5 + i,
        )
        for i, reward in enumerate(rewards)
    )
    verdicts = tuple(Verdict(r, "right" if r else "truncated", "7" if r else "", "", 0.25) for r in rewards)
    return Group(prompt, completions, verdicts)


def advantaged(group: Group, *advantages: float) -> AdvantagedGroup:
    return AdvantagedGroup(group, np.array(advantages, np.float32))


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    """Every field of hand-made rows, read by plain pyarrow. A problem that comes twice keeps both advantages."""
    first, twin, rejected = make_group("a", (1, 0)), make_group("a", (0, 1)), make_group("b", (0, 0))
    store = RolloutStore(tmp_path, keep_bytes=1 << 30)
    store.write(12, "short", [first, rejected, twin], [advantaged(first, 0.7, -0.7), advantaged(twin, -0.7, 0.7)])
    store.close()

    rows = pq.read_table(tmp_path / "step_000012.parquet").to_pylist()
    assert [row["problem_id"] for row in rows] == ["a", "a", "b", "b", "a", "a"]
    assert [row["kept"] for row in rows] == [True, True, False, False, True, True]
    assert [round(row["advantage"], 6) for row in rows] == [0.7, -0.7, 0.0, 0.0, -0.7, 0.7]
    assert {name: rows[1][name] for name in rows[1] if name not in ("advantage", "kept")} == {
        "step": 12,
        "stage": "short",
        "problem_id": "a",
        "sample_index": 1,
        "source": "train-math-x",
        "ability": "math",
        "ground_truth": '["7"]',
        "prompt": "Compute a.",
        "prompt_token_ids": [1, 2, 3],
        "response": "<think>1</think> 7",
        "response_token_ids": [0, 1, 2, 3, 4, 5],
        "log_probs": [-1.0] * 6,
        "finish_reason": "length",
        "truncated": True,
        "versions": [{"version": 3, "first_token": 0}, {"version": 4, "first_token": 2}],
        "engine": 1,
        "seed": (1 << 40) + 1,
        "started_s": 100.0,
        "finished_s": 101.5,
        "reward": 0.0,
        "status": "truncated",
        "answer": "",
        "detail": "",
        "verify_wall_s": 0.25,
        "log_prob_differences": None,
        "entropies": None,
    }
    assert list(rows[0]) == [field.name for field in ROLLOUT]
    assert read_rollouts(tmp_path / "step_000012.parquet", ["reward"]).column("reward").to_pylist() == [
        1,
        0,
        0,
        0,
        0,
        1,
    ]


def test_what_the_policy_made_of_the_trained_tokens(tmp_path: Path) -> None:
    """Policy minus engine, in float16; null for a rejected group, and if not every token has a score."""
    kept, rejected = make_group("a", (1, 0)), make_group("b", (0, 0))
    scores = TokenScores(
        (np.full(5, -0.75, np.float32), np.full(3, -1.0, np.float32)),
        (np.arange(5, dtype=np.float32), np.zeros(3, np.float32)),
    )
    store = RolloutStore(tmp_path, keep_bytes=1 << 30)
    store.write(1, "short", [rejected, kept], [advantaged(kept, 0.7, -0.7)], scores)
    store.close()
    rows = pq.read_table(tmp_path / "step_000001.parquet").to_pylist()
    assert [row["log_prob_differences"] for row in rows] == [None, None, [-0.25] * 5, None]  # the engine's: -0.5
    assert [row["entropies"] for row in rows] == [None, None, [0, 1, 2, 3, 4], None]


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    """A missing nullable field is null; the error names any other."""
    table = to_table(1, "short", [make_group("a", (1, 0))], [])
    path = tmp_path / "step_000001.parquet"
    pq.write_table(table.drop_columns(["entropies", "log_prob_differences"]), path)
    assert read_rollouts(path).column_names == [field.name for field in ROLLOUT]
    assert read_rollouts(path, ["reward", "entropies"]).to_pylist() == [
        {"reward": 1.0, "entropies": None},
        {"reward": 0.0, "entropies": None},
    ]
    pq.write_table(table.drop_columns(["kept"]), path)
    with pytest.raises(ValueError, match="not a rollout file of this version: it lacks kept"):
        read_rollouts(path)


def test_a_step_without_groups_is_an_empty_file(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, keep_bytes=1 << 30)
    store.write(0, "short", [], [])
    store.close()
    assert read_rollouts(tmp_path / "step_000000.parquet").num_rows == 0


def test_a_kept_group_of_another_step_is_refused() -> None:
    with pytest.raises(ValueError, match="rollouts of step 3: a kept group is not among"):
        to_table(3, "short", [make_group("a", (1, 0))], [advantaged(make_group("a", (1, 0)), 1.0, -1.0)])


def test_write_returns_while_the_writing_thread_is_busy(tmp_path: Path) -> None:
    """The messages of step 1 make the thread that reads them wait. Step 2 is queued, step 3 waits."""
    reading, go_on = threading.Event(), threading.Event()

    class Messages(tuple[Message, ...]):
        def __len__(self) -> int:
            reading.set()
            go_on.wait()
            return super().__len__()

    group = make_group("a", (1, 0))
    problem = replace(group.prompt.problem, messages=Messages(group.prompt.problem.messages))
    store = RolloutStore(tmp_path, keep_bytes=1 << 30)
    store.write(1, "short", [replace(group, prompt=replace(group.prompt, problem=problem))], [])
    store.write(2, "short", [], [])
    third = threading.Thread(target=store.write, args=(3, "short", [], []))
    third.start()
    reading.wait()
    assert rollout_files(tmp_path) == [] and third.is_alive()
    go_on.set()
    third.join()
    store.close()
    assert [path.name for path in rollout_files(tmp_path)] == [f"step_00000{step}.parquet" for step in (1, 2, 3)]


def test_oldest_files_go_beyond_the_bytes(tmp_path: Path) -> None:
    for step, size in ((9, 60), (10, 50), (100, 40)):
        (tmp_path / f"step_{step:06d}.parquet").write_bytes(b"x" * size)
    delete_oldest(tmp_path, keep_bytes=95)
    assert [path.name for path in rollout_files(tmp_path)] == ["step_000010.parquet", "step_000100.parquet"]
    delete_oldest(tmp_path, keep_bytes=1)
    assert [path.name for path in rollout_files(tmp_path)] == ["step_000100.parquet"]  # the newest stays


def test_leftovers_of_a_killed_write_are_removed(tmp_path: Path) -> None:
    (tmp_path / "step_000001.parquet.partial").write_bytes(b"half")
    RolloutStore(tmp_path, keep_bytes=1).close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_named_and_costs_no_earlier_step(tmp_path: Path) -> None:
    """A real full file system: a tmpfs of 64 KiB."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        store = RolloutStore(small, keep_bytes=1 << 30)
        little, much = make_group("a", (1, 0)), make_group("b", (1, 0), tokens=1)
        noise = np.random.default_rng(0).integers(0, 1 << 31, 40_000).astype(np.int32)  # does not compress
        completion = much.completions[0]
        much = Group(
            much.prompt,
            (Completion(**{name: getattr(completion, name) for name in completion.__slots__} | {"token_ids": noise}),),
            much.verdicts[:1],
        )
        store.write(1, "short", [little], [])
        store.write(2, "short", [much], [])
        with pytest.raises(DiskFullError, match=r"the rollouts of step 2.*step_000002\.parquet"):
            store.close()
        assert os.listdir(small) == ["step_000001.parquet"]
        assert read_rollouts(small / "step_000001.parquet").num_rows == 2
    finally:
        subprocess.run(["umount", small], check=True)


def test_failure_reaches_the_next_write_not_only_close(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, keep_bytes=1 << 30)
    (tmp_path / "step_000001.parquet.partial").mkdir()  # nothing can be written there
    store.write(1, "short", [make_group("a", (1, 0))], [])
    store.wait_written()
    with pytest.raises(OSError, match="step_000001"):
        store.write(2, "short", [], [])
    store.close()


def test_the_thread_ends_with_close(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, keep_bytes=1)
    store.write(1, "short", [], [])
    store.close()
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollout-store")]


def test_kill_while_writing_keeps_earlier_steps(tmp_path: Path) -> None:
    """After kill -9 of an endless writer every file with its final name is whole."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from test_rollout_store import *\n"
        "store = RolloutStore(Path(sys.argv[1]), 1 << 30)\n"
        "groups = [make_group(str(i), (1, 0) * 8, tokens=200) for i in range(8)]\n"
        "for step in range(10**6): store.write(step, 's', groups, [])\n"
    )
    paths = Path(__file__).parent, Path(__file__).parents[1]
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *map(str, paths)])
    try:
        wait_until(lambda: len(rollout_files(tmp_path)) >= 5, "five files")
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    files = rollout_files(tmp_path)
    assert len(files) >= 5
    assert all(read_rollouts(path).num_rows == 128 for path in files)
    assert rollout_store.step_of(files[-1]) == len(files) - 1
