"""Rows that cannot be used, from ``or1 train``'s side: all of them in one try, or left out; a resumed run is the same.

Not proven here: whole runs. What is unusable, and its place: data/test_problems.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.config.load import load_config
from or1_megatron.data.prompts import make_prompts, read_problems
from or1_megatron.data.stream import MixtureStream
from or1_verify.problems.rows import DataError

SmallConfig = Callable[[Path], Path]

BAD_GOLD = '{"prompt": "%d is it?", "answer": " "}\n'
GOOD = '{"prompt": "%d+1?", "answer": "2"}\n'


def written(path: Path, *lines: str) -> str:
    """The overrides that train on a file of these lines."""
    path.write_text("".join(lines))
    return f"data.train=[{{path: {path}}}]"


def places(said: str) -> list[int]:
    return [int(number) for number in re.findall(r"train\.jsonl:(\d+): ", said)]


def test_sixty_golds_without_text_are_found_at_once(small_config: SmallConfig, tmp_path: Path) -> None:
    """By --check and by what rank 0 does, once the engines start; each third line is one."""
    lines = [(BAD_GOLD if n % 3 == 2 else GOOD) % n for n in range(180)]
    data = written(tmp_path / "train.jsonl", *lines)
    config = small_config(tmp_path / "run")
    checked = CliRunner().invoke(app, ["train", str(config), "--check", "--set", data])
    assert checked.exit_code == 2
    loaded = load_config(config, [data])
    with closing(read_problems(loaded)) as problems, pytest.raises(DataError) as caught:
        make_prompts(loaded, problems)
    for said in (checked.stderr, str(caught.value)):
        assert "60 unusable rows (60 ground truth cannot be used)" in said
        assert places(said) == list(range(3, 63, 3))
        assert f"and 40 more; {tmp_path / 'run' / 'unusable_rows.jsonl'} lists them" in said
        assert "leave them out with data.unusable=drop" in said
    listed = (tmp_path / "run" / "unusable_rows.jsonl").read_text().splitlines()
    assert places("".join(json.loads(line)["row"] + ": " for line in listed)) == list(range(3, 181, 3))


def test_a_start_names_all_kinds_at_once_before_any_engine(small_config: SmallConfig, tmp_path: Path) -> None:
    """A missing field is found before engines start, a gold while they do: with one of the first kind, all are named
    before."""
    chess = '{"prompt": "5?", "answer": "[]", "ability": "chess"}\n'
    lines = [GOOD % 0, BAD_GOLD % 1, '{"prompt": "3?"}\n', GOOD % 3, "{\n", chess, *(GOOD % n for n in range(6, 14))]
    data = written(tmp_path / "train.jsonl", *lines)
    held_out = tmp_path / "held.jsonl"
    held_out.write_text(BAD_GOLD % 9)
    with pytest.raises(DataError) as caught:
        read_problems(load_config(small_config(tmp_path / "run"), [data, f"evaluate.data=[{{path: {held_out}}}]"]))
    said = str(caught.value)
    assert said.startswith("5 unusable rows (2 ground truth")
    assert places(said) == [2, 3, 5, 6] and f"{held_out}:1: " in said


def test_dropped_rows_are_counted_and_the_rest_is_trained_on(
    small_config: SmallConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts, order and fingerprint are those of a file without the bad rows, so that a run resumes on either."""
    lines = [(BAD_GOLD if n % 2 else GOOD) % n for n in range(40)]
    config = small_config(tmp_path / "run")
    bad = load_config(config, [written(tmp_path / "train.jsonl", *lines), "data.unusable=drop"])
    (tmp_path / "clean").mkdir()
    good = load_config(config, [written(tmp_path / "clean" / "train.jsonl", *lines[::2])])
    streams = []
    for loaded in (bad, good):
        with closing(read_problems(loaded)) as problems:
            assert problems.verifiers.keys() == {"math"}
            streams.append(MixtureStream(make_prompts(loaded, problems)[0], 1))
    assert "data.unusable=drop: 20 unusable rows (20 ground truth cannot be used) left out" in caplog.text
    first, second = streams
    first.take(7)
    second.restore(first.state())
    assert [p.problem.id for p in first.take(9)] == [p.problem.id for p in second.take(9)]


def test_a_problem_of_two_sources_is_in_the_first(
    small_config: SmallConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of a named data_source, so that their ids agree; before any engine starts."""
    row = {
        "data_source": "x", "prompt": [{"role": "user", "content": "1+1?"}], "ability": "math",
        "reward_model": {"ground_truth": '["2"]', "style": "rule"}, "extra_info": {"index": 1},
    }  # fmt: skip
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text(json.dumps(row) + "\n" + "".join(GOOD % n for n in range(8)))
    train = "data.train=[" + ", ".join(f"{{path: {path}}}" for path in paths) + "]"
    config = small_config(tmp_path / "run")
    loaded = load_config(config, [train])
    with closing(read_problems(loaded)) as problems:
        sources, _ = make_prompts(loaded, problems)
    assert "1 problems of the source of" in caplog.text
    assert [len(source.prompts) for source in sources] == [9, 8]
