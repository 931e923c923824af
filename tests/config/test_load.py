"""Configuration files: overlays, overrides, environment, refusals, the way back to YAML, and what may change on resume.

Not proven here: that the values do what they say; the schema's own rules are pydantic's.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

from or1_megatron.config.explain import explain
from or1_megatron.config.keys import keys_of
from or1_megatron.config.load import ConfigError, from_json, load_as, load_config, resolved_yaml, to_json, value_of
from or1_megatron.config.removed import REMOVED
from or1_megatron.config.resume import NEXT_STAGE_CHANGES, NOT_RESUMABLE, check_next_stage, check_resume
from or1_megatron.config.schema import Config

ROOT = Path(__file__).parents[2]
BASE = """\
run: {dir: runs/x}
model: {hf: model}
data:
  train: [{path: a.jsonl}, {path: b.jsonl, repeat: 2}]
stages:
  - name: one
    steps: 5
    max_response_tokens: 64
    prompts_per_step: 8
    prompts_per_update: 4
    group_size: 4
optimizer:
  lr: 1e-5
  weight_decay: 0.1
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_values_and_defaults(base: Path) -> None:
    config = load_config(base)
    assert config.optimizer.lr == 1e-5  # plain YAML 1.1 would call 1e-5 a string
    assert config.optimizer.beta2 == 0.999
    assert [source.repeat for source in config.data.train] == [1, 2]
    assert config.run.dir == Path("runs/x")  # relative paths stay as written


def test_overlays_chain_and_lists_replace(base: Path) -> None:
    middle = base.parent / "sub" / "middle.yaml"
    middle.parent.mkdir()
    middle.write_text("base: ../base.yaml\noptimizer: {lr: 2e-5}\nrun: {seed: 7}\n")
    top = base.parent / "top.yaml"
    top.write_text("base: sub/middle.yaml\ndata: {train: [{path: c.jsonl}]}\nrun: {seed: 8}\n")
    config = load_config(top)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.run.seed) == (2e-5, 0.1, 8)
    assert [source.path.name for source in config.data.train] == ["c.jsonl"]
    assert config.data.max_prompt_tokens == 2048


def test_a_cycle_and_a_missing_base_are_refused(base: Path) -> None:
    other = base.parent / "other.yaml"
    other.write_text("base: third.yaml\n")
    (base.parent / "third.yaml").write_text("base: other.yaml\n")
    assert "leads back to itself" in refusal(other)
    other.write_text("\nbase: gone.yaml\n")
    assert "other.yaml:2: base: no such file" in refusal(other)
    other.write_text("base: [a, b]\n")
    assert "expected one file name" in refusal(other)


def test_overrides(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        base, ["stages.0.steps=3", "optimizer.lr=3e-4", "track.wandb_project='12'", "parallel.ranks=2"]
    )
    assert config.stages[0].steps == 3
    assert config.optimizer.lr == 3e-4
    assert config.track.wandb_project == "12"
    assert config.parallel.ranks == 2
    monkeypatch.setenv("HOME", "/home/me")
    assert load_config(base, ["run.dir=~/x"]).run.dir == Path("/home/me/x")
    assert load_config(base, ["evaluate.data=[{path: e.jsonl}]"]).evaluate.data[0].path.name == "e.jsonl"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("stages.1.steps=3", ["stages is a list of 1"]),
        ("stages.x.steps=3", ["stages is a list of 1"]),
        ("run.seed.x=1", ["--set run.seed.x=1: run.seed: found", "expected an integer"]),
        ("stages.0.steps.x=1", ["stages.0.steps is 5 (integer)"]),
        ("model.hf=~nobody-here/m", ["--set model.hf=~nobody-here/m", "home"]),
        ("nonsense", ["expected key.subkey=value"]),
        ("optimizer.lr={", ["not valid YAML"]),
        ("optimizer.lr=1e400", ["optimizer.lr: found", "finite number"]),
        ("optimizer.beta2=1.5", ["optimizer.beta2: found 1.5", "less than 1"]),
        ("optimizer.lrr=1", ["--set optimizer.lrr=1: optimizer.lrr: unknown key", "did you mean optimizer.lr?"]),
    ],
)
def test_a_bad_override_is_named(base: Path, override: str, parts: list[str]) -> None:
    message = refusal(base, override)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("algorithm: {entropy: {targt: 1}}", ":15: algorithm.entropy.targt: unknown key; did you mean algorithm.en"),
        ("algoritm: {}", ":15: algoritm: unknown key; did you mean algorithm?"),
        ("engines: 2", ":15: engines: unknown key; did you mean rollout.engines?"),
        ("verify: {zzz: 2}", ":15: verify.zzz: unknown key; known here: math, workers, timeout_s"),
        ("parallel:\n  ranks: '3'", ':16: parallel.ranks: found "3" (string), expected an integer'),
        ("parallel: {ranks: true}", ":15: parallel.ranks: found true (true/false), expected an integer"),
        ("parallel: {ranks: 2.5}", ":15: parallel.ranks: found 2.5 (number), expected an integer"),
        ("model:\n  dtype: fp8", ":15: model: given twice; first in line 2"),
        ("verify:", ":15: verify: found nothing (null), expected a mapping"),
        ("checkpoint: {every_steps: 0}", ":15: checkpoint.every_steps: found 0 (integer), expected greater than 0"),
        ("parallel: {ranks: 3, tensor: 2}", ":15: parallel: ranks = 3 is not a multiple of tensor"),
        ("handoff: {probe_bound: .nan}", ':15: handoff.probe_bound: found ".nan" (string), expected a number'),
        ("rollout: &a {<<: *a}", ":15: "),
    ],
)  # fmt: skip
def test_a_bad_key_or_value_is_named_with_its_line(base: Path, lines: str, expected: str) -> None:
    base.write_text(BASE + lines + "\n")
    assert expected in refusal(base)


@pytest.mark.parametrize("key", sorted(REMOVED.keys() - {"data.train.weight"}))
def test_a_removed_key_is_refused_with_what_to_do(base: Path, key: str) -> None:
    """In a file, named by its line; in an override; and where one key is asked for."""
    first, *rest = key.split(".")
    nested = "".join(f"{{{part}: " for part in rest) + "7" + "}" * len(rest)
    base.write_text(f"{BASE}{first}: {nested}\n")
    assert refusal(base) == f"{base}:15: {key}: was removed: {REMOVED[key]}"
    base.write_text(BASE)
    assert refusal(base, f"{key}=7") == f"--set {key}=7: {key}: was removed: {REMOVED[key]}"
    for ask in (lambda: value_of(load_config(base), key), lambda: explain(key)):
        with pytest.raises(ConfigError) as error:
            ask()
        assert str(error.value) == f"{key}: was removed: {REMOVED[key]}"


def test_a_removed_key_of_a_list_s_items_is_refused(base: Path) -> None:
    why = f"was removed: {REMOVED['data.train.weight']}"
    base.write_text(BASE.replace("repeat: 2", "weight: 0.5"))
    assert refusal(base) == f"{base}:4: data.train.1.weight: {why}"


def test_a_run_s_own_configuration_of_a_former_version_loads(base: Path) -> None:
    """It has every key, those too that were removed since, in sections and in a list's items."""
    keys = (
        "algorithm: {loss: {clip_low: 0.1, divisor: own}, entropy: {preset: null}}\nrollout: {tail: wait, engines: 3}"
    )
    base.write_text(f"{BASE.replace('repeat: 2', 'repeat: 2, weight: 1.0')}{keys}\n")
    config = load_as(Config, base, own=True)
    assert (config.rollout.engines, config.algorithm.loss.clip_low, config.data.train[1].repeat) == (3, 0.1, 2)
    assert len(refusal(base).splitlines()) == 4


def test_what_a_removed_key_s_sentence_names_is_there() -> None:
    """Knowledge checked by its inverse: no removed key is a key, and the keys and pages that the sentences name are."""
    keys = {key.name for key in keys_of(Config)}
    assert not keys & REMOVED.keys()
    sentences = " ".join(REMOVED.values())
    named = [word.rstrip(".,;") for word in re.findall(r"[a-z_/0-9]+(?:\.[a-z_]+)+", sentences)]
    assert named and all(
        name in keys or name.rpartition(".")[0] in keys or (ROOT / name).is_file() for name in named
    ), named


def test_all_errors_are_told_and_a_missing_key_is_one(base: Path) -> None:
    base.write_text(BASE.replace("    group_size: 4\n", "").replace("lr:", "learning_rate:"))
    message = refusal(base)
    assert "base.yaml:6: stages.0.group_size: missing" in message
    assert "base.yaml:12: optimizer.learning_rate: unknown key" in message
    assert len(message.splitlines()) == 2


def test_unreadable_files(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"run: \xff\n")
    assert "not UTF-8" in refusal(bad)
    bad.write_text("run: [1\nmodel: 2\n")
    assert "bad.yaml:2: not valid YAML" in refusal(bad)
    bad.write_text("- a\n")
    assert "found a list, expected a mapping of sections" in refusal(bad)
    bad.write_text("")
    assert "run: missing" in refusal(bad)


def test_environment(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = BASE.replace("{dir: runs/x}", '{dir: "${OR1_TEST_DIR}/x"}').replace(
        "steps: 5", "steps: ${OR1_TEST_STEPS:-9}"
    )
    base.write_text(text.replace("{hf: model}", '{hf: "$${HOME}/m"}'))
    monkeypatch.delenv("OR1_TEST_DIR", raising=False)
    assert "base.yaml:1: run.dir: environment variable OR1_TEST_DIR is not set" in refusal(base)
    monkeypatch.setenv("OR1_TEST_DIR", "/data")
    config = load_config(base)
    assert (config.run.dir, config.stages[0].steps) == (Path("/data/x"), 9)
    assert config.model.hf == Path("${HOME}/m")
    monkeypatch.setenv("OR1_TEST_STEPS", "12")
    assert load_config(base).stages[0].steps == 12
    monkeypatch.setenv("OR1_TEST_STEPS", "many")
    assert 'stages.0.steps: found "many" (string)' in refusal(base)


def test_the_resolved_copy_reads_back_equal(base: Path, tmp_path: Path) -> None:
    odd = [
        "model.hf='$${HOME}/m'",
        "track.wandb_project='1e-6'",
        "optimizer.lr=1.2345678901234567e-9",
        "run.dir='yes: #'",
    ]
    config = load_config(base, odd)
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    assert resolved_yaml(load_config(tmp_path / "resolved.yaml")) == resolved_yaml(config)
    assert from_json(to_json(config)) == config


def test_what_may_change_on_resume(base: Path) -> None:
    old = load_config(base)
    check_resume(
        old, load_config(base, ["stages.0.steps=50", "parallel.ranks=2", "rollout.engines=2", "run.dir=other"])
    )
    with pytest.raises(ConfigError) as error:
        check_resume(old, load_config(base, ["optimizer.lr=1e-3", "data.train=[{path: a.jsonl}]", "parallel.ranks=2"]))
    message = str(error.value)
    assert "optimizer.lr: was 1e-05, now 0.001" in message
    assert 'data.train.1.path: was "b.jsonl", now absent' in message
    assert "parallel" not in message


def test_what_decides_a_reward_may_not_change_on_a_resume(base: Path) -> None:
    """A verifier of one's own, named, exchanged or taken back; its time limit may."""
    odd, even = (
        load_config(base, [f"verify.custom.math=my:{name}", f"verify.timeout_s={len(name)}"])
        for name in ("odd", "even")
    )
    for old, new in ((odd, even), (odd, load_config(base)), (load_config(base), odd)):
        with pytest.raises(ConfigError, match=r"verify\.custom") as refused:
            check_resume(old, new)
        assert "timeout_s" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"verify\.right_reward: was 1\.0, now 0\.5"):
        check_resume(odd, load_config(base, ["verify.custom.math=my:odd", "verify.right_reward=0.5"]))


def test_staleness_may_not_change_on_a_resume(base: Path) -> None:
    """Though the rest of ``rollout`` may."""
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness: was 0, now 1"):
        check_resume(load_config(base), load_config(base, ["rollout.max_staleness=1", "rollout.engines=2"]))


TWO_STAGES = (
    "stages=[{name: a, steps: 4, max_response_tokens: 8, prompts_per_step: 2, prompts_per_update: 2, group_size: 2}, "
    "{name: b, steps: 4, max_response_tokens: 16, prompts_per_step: 2, prompts_per_update: 2, group_size: 2}]"
)


def test_what_a_next_stage_may_change(base: Path) -> None:
    """Its own entry, the algorithm, the optimizer, layout and evaluation; not the model, the data, or what was done."""
    old = load_config(base, [TWO_STAGES, "run.stage=1"])
    fine = ["stages.1.group_size=4", "stages.0.steps=3", "optimizer.lr=1e-3", "parallel.ranks=4", "evaluate.samples=3"]
    check_next_stage(old, load_config(base, [TWO_STAGES, "run.stage=2", *fine]), Path("x"))
    wrong = ["stages.0.group_size=4", "run.seed=9", "data.max_prompt_tokens=7"]
    with pytest.raises(ConfigError) as error:
        check_next_stage(old, load_config(base, [TWO_STAGES, "run.stage=2", *fine, *wrong]), Path("x"))
    lines = str(error.value).splitlines()
    assert "stage 2 cannot begin from x" in lines[0]
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == sorted(w.split("=")[0] for w in wrong)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["stages.0.group_size=1"], "stages.0.group_size: found 1 (integer), expected greater than or equal to 2"),
        (["run.stage=3"], "run.stage = 3, but there are 2 stages"),
        (["run.previous=runs/x"], "run.previous = runs/x is for a run of one stage after the first; run.stage is None"),
        (["stages.1.mixture={a: 1}"], "stage 'b': mixture names ['a']; expected each source of data.train once"),
        (["stages.1.mixture={a: 0, b: 0}"], "stage 'b': mixture leaves every source out"),
        (["stages.1.min_pass_rate=0.9", "stages.1.max_pass_rate=0.5"], "min_pass_rate = 0.9 is above max_pass_rate"),
        (["stages.1.plateau={min_steps: 5}"], "plateau.min_steps = 5 is above steps = 4"),
        (["evaluate.data=[{path: x/e.jsonl}, {path: y/e.jsonl}]"], "evaluate.data: two of its entries are named 'e'"),
        (["evaluate.data=[{path: e.jsonl, name: a/b}]"], "a set cannot be named 'a/b'"),
        (["rollout.max_staleness=-1"], "rollout.max_staleness: found -1"),
    ],
)
def test_stages_that_cannot_be(base: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(base, [TWO_STAGES, *overrides])
    assert said in str(error.value)


def test_mixture_by_name(base: Path) -> None:
    """The sources a.jsonl and b.jsonl go by their files' names; a stage without a mixture has their repeats."""
    config = load_config(base, [TWO_STAGES, "stages.1.mixture={b: 3, a: 0}", "data.train.0.repeat=2"])
    assert [config.repeats(stage) for stage in config.stages] == [(2, 2), (0, 3)]


def test_every_resumable_change_names_a_real_key() -> None:
    """Knowledge checked by its inverse: a renamed key must not linger in the list."""
    keys = [key.name for key in keys_of(Config)]
    for pattern in (*NEXT_STAGE_CHANGES, *NOT_RESUMABLE):
        assert any(fnmatch.fnmatchcase(key, pattern) for key in keys), pattern
