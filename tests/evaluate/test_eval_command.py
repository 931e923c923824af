"""``or1 eval`` end to end over HTTP: a small server speaks the protocol and knows which problems it solves how often;
another fails, stalls and answers with garbage, until every sample is there.

Not proven here: our own engines (the slow test asks them), vLLM's own server, scores of real models, TLS, and a server
that sends headers a byte at a time.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai_server import Reply, completion, serving
from rich.console import Console
from rows_as_published import livecodebench
from typer.testing import CliRunner
from waiting import PATIENCE_S

from or1_megatron.commands.app import app
from or1_megatron.commands.eval import evaluate_model
from or1_megatron.config.load import load_as
from or1_megatron.convert.to_megatron import hf_to_megatron
from or1_megatron.data.problems import load_problems
from or1_megatron.evaluate.benchmarks import load_set
from or1_megatron.evaluate.response_store import EvaluationError, Response
from or1_megatron.evaluate.scores import summarise
from or1_megatron.evaluate.settings import PAPER_RESPONSE_TOKENS, EvaluationSettings, EvaluationVerifyConfig
from or1_verify.problems.rows import DataError
from or1_verify.problems.wording import BOX_INSTRUCTION
from or1_verify.verifiers import build_verifiers

ROOT = Path(__file__).parents[2]


class Server:
    """Answers ``n`` right when the seed's turn says so: problem "What is i+i?" is solved in i of every 4 samples."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.fail_after: int | None = None
        self.refuse = False
        self.url = ""

    def answer(self, body: dict[str, Any]) -> Reply:
        prompt = body["messages"][-1]["content"]
        number = int(prompt.split("+")[0].rsplit(" ", 1)[1])
        if self.refuse:
            return 400, {"error": "max_tokens is too large"}
        turn = self.asked[prompt]
        self.asked[prompt] += 1
        if self.fail_after is not None and self.asked.total() > self.fail_after:
            return 200, {"nonsense": body["model"]}
        right = turn % 4 < number
        status, reply = completion(f"<think>so</think>\\boxed{{{2 * number if right else 99}}}")
        return status, {**reply, "usage": {"completion_tokens": 10 * (turn + 1)}}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with serving(made.answer) as made.url:
        yield made


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"What is {i}+{i}?", "answer": str(2 * i), "date": f"2024-0{i + 1}-15"} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(**changes: Any) -> EvaluationSettings:
    fields = {"max_response_tokens": 64, "concurrent": 1, "tries": 1, "verify": {"workers": 1, "timeout_s": PATIENCE_S}}
    return EvaluationSettings.model_validate({**fields, **changes})


def run(server: Server, problems: Path, out: Path, k: int | None, **changes: Any) -> dict[str, Any]:
    console = Console(file=(out.parent / "shown.txt").open("a"), width=120)
    return evaluate_model(server.url, str(problems), k, out, settings(**changes), console, Path("none"))


def test_scores_are_the_servers_and_the_same_command_asks_no_more(
    server: Server, problems: Path, tmp_path: Path
) -> None:
    """Problem i of 0..4 is solved in i of 4 samples: avg@4 = (0 + 1 + 2 + 3 + 4) / 20; pass@4 = 4/5."""
    out = tmp_path / "out"
    outcome = run(server, problems, out, 4)["outcome"]
    assert outcome["average"]["value"] == pytest.approx(0.5)
    assert outcome["passed"][1]["value"] == pytest.approx(0.5)
    assert outcome["passed"][4]["value"] == pytest.approx(0.8)
    assert outcome["statuses"] == {"right": 10, "wrong": 10}
    assert outcome["mean_tokens"] == 25.0  # 10, 20, 30, 40 of each
    # With a budget of 512 tokens nothing changes; the limit here is 64.
    assert outcome["by_budget"] == {64: 0.5}
    assert server.asked.total() == 20
    run(server, problems, out, 4)
    assert server.asked.total() == 20
    assert run(server, problems, out, 6)["outcome"]["samples"] == 6  # only what is new is asked for
    assert server.asked.total() == 30
    shown = (tmp_path / "shown.txt").read_text()
    assert "avg@4" in shown and "50.0%" in shown
    assert (out / "results.svg").read_text().startswith("<svg")


def test_problems_that_cannot_be_used_are_all_named_or_left_out(server: Server, tmp_path: Path) -> None:
    """Problems 1 and 3 have golds without text, one line is no JSON: with drop, 0, 2 and 4 are asked, twice."""
    golds = ["0", " ", "4", "\t", "8"]
    rows = [json.dumps({"prompt": f"What is {i}+{i}?", "answer": gold}) for i, gold in enumerate(golds)]
    (tmp_path / "sums.jsonl").write_text("\n".join([rows[0], "{", *rows[1:]]) + "\n")
    out = tmp_path / "out"
    with pytest.raises(DataError) as caught:
        run(server, tmp_path / "sums.jsonl", out, 2)
    said = str(caught.value).splitlines()
    assert said[0] == "3 unusable rows (2 ground truth cannot be used, 1 not a JSON object):"
    assert [line.split(": ")[0] for line in said[1:4]] == [f"  {tmp_path}/sums.jsonl:{n}" for n in (2, 3, 5)]
    assert said[4] == "Correct them, or leave them out with --set unusable=drop" and not server.asked
    outcome = run(server, tmp_path / "sums.jsonl", out, 2, unusable="drop")["outcome"]
    assert (outcome["problems"], outcome["statuses"]) == (3, {"wrong": 2, "right": 4})
    assert len((out / "unusable_rows.jsonl").read_text().splitlines()) == 3
    run(server, tmp_path / "sums.jsonl", out, 2, unusable="drop")
    assert server.asked.total() == 6


def test_what_came_before_a_failure_is_kept(server: Server, problems: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    server.fail_after = 7
    with pytest.raises(EvaluationError, match=r"13 of 20 responses did not come .*expected a chat completion"):
        run(server, problems, out, 4)
    assert len((out / "responses.jsonl").read_text().splitlines()) == 7
    server.fail_after = None
    run(server, problems, out, 4)
    assert len((out / "responses.jsonl").read_text().splitlines()) == 20


def test_a_server_that_refuses_everything_is_no_score_of_nought(server: Server, problems: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    server.refuse = True
    with pytest.raises(
        EvaluationError, match=r"every request was refused, 10 so far \(first: .*max_tokens is too large"
    ):
        run(server, problems, out, 2)
    server.refuse = False
    assert run(server, problems, out, 2)["outcome"]["statuses"] == {"right": 7, "wrong": 3}  # 0, 1, 2, 2, 2 of 2


def test_a_score_of_nought_says_why(problems: Path, tmp_path: Path) -> None:
    """No response closes its reasoning."""
    silent = Server()
    with serving(lambda _: completion("<think> two and two")) as silent.url:
        run(silent, problems, tmp_path / "out", 1)
    shown = (tmp_path / "shown.txt").read_text()
    assert "no response earned a reward: 5 no_answer (the reasoning is never closed)" in shown


def test_another_way_of_asking_is_not_mixed_in(server: Server, problems: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(server, problems, out, 1)
    with pytest.raises(EvaluationError, match=r"temperature: was 1\.0, now 0\.6"):
        run(server, problems, out, 1, temperature=0.6)
    with pytest.raises(EvaluationError, match=r"verify\.math"):  # verdicts of two judges would be mixed
        run(server, problems, out, 1, verify={"math": {"judge": "math_verify"}})


def test_a_folder_that_was_tampered_with_is_refused_by_row(server: Server, problems: Path, tmp_path: Path) -> None:
    """A torn last line is asked for again; a row of something else, and settings that cannot be read, are named."""
    out = tmp_path / "out"
    run(server, problems, out, 2)
    responses = out / "responses.jsonl"
    whole = responses.read_text()
    responses.write_text(whole[:-30])
    run(server, problems, out, 2)
    assert server.asked.total() == 11
    responses.write_text('{"other": 1}\n' + whole)
    with pytest.raises(EvaluationError, match=r"responses.jsonl: row 1 is no response .*found \['other'\], expected"):
        run(server, problems, out, 2)
    responses.write_text(whole)
    (out / "evaluation.json").write_text("garbage")
    with pytest.raises(EvaluationError, match=r"evaluation.json: not JSON .*so that how .* was asked is not known"):
        run(server, problems, out, 2)


def test_a_window_of_dates(problems: Path) -> None:
    day = datetime.date.fromisoformat
    found = load_set(str(problems), Path("none"), day("2024-02-15"), day("2024-04-15"))
    assert [p.messages[0].content for p in found.problems] == ["What is 1+1?", "What is 2+2?", "What is 3+3?"]
    assert str(found).startswith("sums: 3 of 5 problems")
    with pytest.raises(
        DataError, match=r"none of 5 problems is from 2030-01-01 to today; their dates: 2024-01-15 to 2024-05-15"
    ):
        load_set(str(problems), Path("none"), day("2030-01-01"))


def test_known_sets_are_written_as_the_report_used_them(tmp_path: Path) -> None:
    """From files, in the columns in which they are published; the hub's way in is test_hub's. AIME24's ending comes
    once, LiveCodeBench's problems are those up to 2025-02-01 at 00:00, which its own loader takes too, with their count
    and release, and training's reader takes what was written."""
    (tmp_path / "livecodebench").mkdir()
    days = ("2024-07-31T23:59", "2024-08-01T00:00", "2025-01-31T19:30", "2025-02-01T00:00", "2025-02-01T19:30")
    for number, day in enumerate(days):
        row = livecodebench(f"Double it, {number}.", contest_date=day)
        (tmp_path / "livecodebench" / f"test{number + 1 if number else ''}.jsonl").write_text(json.dumps(row))
    row = {"Problem": "What is 1+1?", "Answer": 2, "ID": "2024-I-1", "Solution": ""}
    for name in ("aime24", "aime25"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    assert load_set("aime25", tmp_path).problems[0].messages[0].content == "What is 1+1?"
    out = tmp_path / "eval"
    for _ in range(2):
        done = CliRunner().invoke(
            app, ["data", "benchmark", "aime24", "livecodebench", "--out", str(out), "--sets", str(tmp_path)]
        )
        assert done.exit_code == 0, done.output
        assert "livecodebench.jsonl: livecodebench: 3 of 5 problems of release_v5" in done.stdout
    (aime,) = load_problems(out / "aime24.jsonl")
    assert aime.messages[0].content == "What is 1+1?" + BOX_INSTRUCTION and aime.ground_truth == '["2"]'
    assert load_set("aime24", out).problems[0].messages == aime.messages
    code = load_problems(out / "livecodebench.jsonl")
    assert [("Double it, 1" in p.messages[0].content, p.ability) for p in code] == [
        (True, "code"),
        *[(False, "code")] * 2,
    ]
    assert code[1].messages[0].content.startswith("You will be given a question (problem specification)")
    assert str(load_set("livecodebench", out)) == "livecodebench: 3 problems of release_v5"
    assert sorted(path.name for path in out.iterdir()) == ["aime24.jsonl", "livecodebench.jsonl"]
    (tmp_path / "aime24.jsonl").write_text((json.dumps({**row, "Answer": None}) + "\n") * 25)
    refused = CliRunner().invoke(app, ["data", "benchmark", "aime24", "--out", str(out), "--sets", str(tmp_path)])
    assert refused.exit_code == 2 and f"and 5 more; {out / 'aime24.unusable_rows.jsonl'} lists them" in refused.stderr
    refused = CliRunner().invoke(app, ["data", "benchmark", "aime26", "--out", str(out), "--sets", str(tmp_path)])
    assert refused.exit_code == 2 and "aime26: no known set; expected one of aime24" in refused.stderr


def test_budgets_cut_off_what_is_longer() -> None:
    def response(sample: int, tokens: int, reward: float) -> Response:
        return Response(
            "p", sample, "s", "math", "[]", "", "", tokens, False, 0.5, "right" if reward else "wrong", "", "", 0
        )

    outcome = summarise(
        [[response(0, 400, 1.0), response(1, 900, 1.0), response(2, 3000, 0.0), response(3, 3000, 1.0)]], 4096
    )
    assert outcome.by_budget == {512: 0.25, 1024: 0.5, 2048: 0.5, 4096: 0.75}
    assert sum(found.responses for found in outcome.by_length) == 4


def test_what_is_wrong_is_said(server: Server, problems: Path, tmp_path: Path) -> None:
    runner = CliRunner()

    def refused(*arguments: str) -> str:
        result = runner.invoke(app, ["eval", "--out", str(tmp_path / "out"), *arguments])
        assert result.exit_code == 2, result.output
        return result.stderr

    assert "no such folder; expected an HF folder, a Megatron checkpoint, or the URL" in refused(
        "--model", "/nowhere", "--data", str(problems)
    )
    assert "its /models names no model" in refused("--model", "http://127.0.0.1:9/v1", "--data", str(problems))
    assert "no known set" in refused("--model", server.url, "--data", "nonsense")
    assert "did you mean temperature" in refused(
        "--model", server.url, "--data", str(problems), "--set", "temprature=1"
    )


def test_the_papers_file_is_the_defaults() -> None:
    paper = load_as(EvaluationSettings, ROOT / "configs/eval/paper.yaml")
    assert (paper.max_response_tokens, paper.temperature, paper.top_p) == (32768, 1.0, 1.0)
    assert (PAPER_RESPONSE_TOKENS, EvaluationSettings().temperature) == (32768, 1.0)
    for name, temperature, top_p, judge in (
        ("paper", 1.0, 1.0, "own"),
        ("released_7b", 0.6, 1.0, "math_verify"),
        ("released_32b", 1.0, 1.0, "math_verify"),
        ("temperature_0_6", 0.6, 0.95, "own"),
        ("greedy", 0.0, 1.0, "own"),
    ):
        preset = load_as(EvaluationSettings, ROOT / f"configs/eval/{name}.yaml")
        assert (preset.max_response_tokens, preset.temperature, preset.top_p) == (32768, temperature, top_p)
        assert (preset.verify.math.judge, preset.verify.memory_bytes, preset.verify.workers) == (judge, 50 * 10**9, 2)


def test_the_verifiers_are_those_of_the_settings(
    server: Server, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--set`` chooses the judge, and an ability of one's own has its verifier: here everything is right."""
    judge = load_as(EvaluationSettings, None, ["verify.math.judge=math_verify"]).verify.math.judge
    config = settings(verify={"workers": 1, "math": {"judge": judge}, "timeout_s": PATIENCE_S}).verify
    with closing(build_verifiers(config, {"math"})["math"]) as verifier:  # ours gives a truncated response nothing
        assert verifier.verify(load_problems(problems)[1], "\\boxed{2}", truncated=True).status == "right"
    (tmp_path / "my_verifiers.py").write_text(
        "def easy(problem, response, truncated):\n    return True\nother = easy\n"
    )
    monkeypatch.chdir(tmp_path)
    rows = [{**json.loads(line), "ability": "easy", "answer": "[1]"} for line in problems.read_text().splitlines()]
    file = tmp_path / "easy.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verify = {"workers": 1, "custom": {"easy": "my_verifiers:easy"}, "timeout_s": PATIENCE_S}
    assert run(server, file, tmp_path / "easy", 1, verify=verify)["outcome"]["statuses"] == {"right": 5}
    with pytest.raises(EvaluationError, match=r"verify\.custom: was {'easy': 'my_verifiers:easy'}"):
        run(server, file, tmp_path / "easy", 1, verify={**verify, "custom": {"easy": "my_verifiers:other"}})


def test_samples_are_the_reports_unless_given(server: Server, problems: Path, tmp_path: Path) -> None:
    """A file named like a set of the report is that set; greedy samples are all the same, so one is taken."""
    four = tmp_path / "livecodebench.jsonl"
    four.write_text(problems.read_text())
    assert run(server, four, tmp_path / "four", None)["outcome"]["samples"] == 4
    assert run(server, problems, tmp_path / "one", None)["outcome"]["samples"] == 1
    assert run(server, four, tmp_path / "greedy", None, temperature=0.0)["outcome"]["samples"] == 1
    with pytest.raises(
        EvaluationError, match="--k 4 with temperature 0, at which all samples of a problem are the same"
    ):
        run(server, four, tmp_path / "greedy", 4, temperature=0.0)


@pytest.mark.slow
def test_engines_answer_an_hf_folder_and_a_checkpoint_made_of_it(tmp_path: Path) -> None:
    """The quickstart's base model: 41% at T = 96. The checkpoint's responses are the folder's, but for rare tokens:
    vLLM promises no bit-equal logits when requests meet in another order."""
    task = [sys.executable, str(ROOT / "examples/quickstart/task.py"), "--out", str(tmp_path)]
    subprocess.run([*task, "--train", "1", "--held-out", "32", "--seed", "1"], check=True)
    data = tmp_path / "heldout.jsonl"
    base = ROOT / "examples/quickstart/base_model"
    hf_to_megatron(base, tmp_path / "megatron", Console(quiet=True))
    how = ("max_response_tokens=96", "dtype=float32", "engines.engines=2", f"engines.kv_cache_bytes={1 << 26}")
    or1 = [sys.executable, "-m", "or1_megatron.commands.app"]  # a process of its own, since it starts Ray
    for name, model in (("hf", base), ("from_megatron", tmp_path / "megatron")):
        command = ["eval", "--model", str(model), "--data", str(data), "--k", "2", "--out", str(tmp_path / name)]
        subprocess.run([*or1, *command, *(part for key in how for part in ("--set", key))], check=True)
    outcome = json.loads((tmp_path / "hf" / "results.json").read_text())["outcome"]
    assert 0.2 <= outcome["average"]["value"] <= 0.65
    lines = [set((tmp_path / name / "responses.jsonl").read_text().splitlines()) for name in ("hf", "from_megatron")]
    assert len(lines[0]) == 64
    assert len(lines[0] & lines[1]) >= 60


QUIET = Console(quiet=True)


def test_answers_that_no_model_gives_are_judged_like_any_other(tmp_path: Path) -> None:
    """Half a character, zero bytes and counts of tokens that cannot be: stored, judged, and in the figures."""
    data = tmp_path / "ones.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) + "\n" for n in range(5)))
    texts = {
        "0": "</think>\\boxed{\ud800}",
        "1": "</think>\x00\\boxed{1}",
        "2": "",
        "3": "</think>\\boxed{1}" + "\ud800",
    }

    def answer(body: dict[str, Any]) -> Reply:
        number = body["messages"][0]["content"][0]
        status, reply = completion(texts.get(number, "</think>\\boxed{1}"))
        tokens: Any = {"0": -5, "1": True, "2": "many", "3": 1e300}.get(number, 7)
        return status, {**reply, "usage": {"completion_tokens": tokens}}

    verify = EvaluationVerifyConfig(workers=1)
    settings = EvaluationSettings(max_response_tokens=64, model="solver", verify=verify, tries=1)
    with serving(answer) as url:
        out = tmp_path / "out"
        outcome = evaluate_model(url, str(data), 1, out, settings, QUIET, Path("none"))["outcome"]
    assert sum(outcome["statuses"].values()) == 5 and outcome["statuses"]["right"] == 3
    assert outcome["mean_tokens"] == 7.0
