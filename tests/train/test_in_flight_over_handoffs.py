"""A run two steps ahead of its trainer, in which an engine is lost at every point of a handoff with requests in flight.

Real trainer ranks, engines, Ray. The faults are brought in by tests/train/sabotage (in_flight), which also sees to it
that requests of two steps ahead are in flight at every handoff, however fast the machine is. Not tried: GPUs, refill,
a manager that dies meanwhile (test_keeps_running).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from engine_fixtures import TinyModel
from training import ROOT, Training, faults, read_rows
from transformers import AutoModelForCausalLM

from or1_megatron.rollout.request_plan import request_seed
from or1_megatron.runtime.seeds import derive_seed
from or1_megatron.types import Int32Array

QUICKSTART = ROOT / "examples" / "quickstart"
POINTS = {"before start", "receiving", "loaded", "before resume_generation", "serving"}
STALENESS, PROMPTS, GROUP = 2, 8, 4
LAST = 10  # rollout steps; the first is a stage of its own


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_nothing_in_flight_is_lost_or_doubled(
    small_config: Callable[[Path], Path], train: Callable[..., Training], tmp_path: Path
) -> None:
    """Engines are killed and stopped in turn at the five points, each in another handoff: every step has the responses
    to the requests of an undisturbed run, once each, those that died with an engine too. No token is of newer weights
    than its step trains, or more than 2 versions older, and each has the log-prob that transformers gives it with the
    weights of its version. Not proven: that the run learns."""
    run, done = tmp_path / "run", tmp_path / "done"
    done.mkdir()
    ahead = [f"rollout.max_staleness={STALENESS}", "rollout.placement=separate", "rollout.max_engine_restarts=5"]
    few = ["rollout.max_concurrent=4", "stages.1.prompts_per_update=8"]
    steps = ["stages.0.steps=1", f"stages.1.steps={LAST - 1}", "evaluate.data=[]", "evaluate.every_steps=0"]
    more = ["cluster.heartbeat_s=10", "checkpoint.every_steps=100", "checkpoint.export_hf_every_steps=1"]
    sabotage = {"SABOTAGE": "in_flight", "SABOTAGE_FOLDER": str(done)}
    training = train(small_config(run), *ahead, *few, *steps, *more, **sabotage)
    status, output = training.finish()
    assert status == 0, output[-6000:]
    assert training.survivors() == []
    in_flight = {path.name: path.read_text().split() for path in done.iterdir() if path.name in POINTS}
    assert in_flight.keys() == POINTS and all(in_flight.values()), in_flight
    kinds = [fault["kind"] for fault in faults(run)]
    assert kinds.count("engine") == len(POINTS), faults(run)
    assert kinds.count("stalled") == 2, faults(run)  # the others were killed

    metrics = [row for row in read_rows(run / "metrics.jsonl") if "rollout/staleness" in row]
    assert [row["step"] for row in metrics] == list(range(1, LAST + 1))
    assert [row["rollout/staleness"] for row in metrics] == [0, *(min(k, STALENESS) for k in range(LAST - 1))]
    models = {version: weights_of(run, version) for version in range(LAST)}
    seeds: list[int] = []
    crossed: list[float] = []  # of responses in flight over a handoff: how far off the other versions' weights are
    for row in metrics:
        newest, responses = int(row["step"]) - 1, rows_of(run, int(row["step"]))
        seeds += [response["seed"] for response in responses]
        versions = [versions_of(response) for response in responses]
        assert max(each.max() for each in versions) <= newest
        assert min(each.min() for each in versions) == newest - row["rollout/staleness"]
        for response, each in zip(responses, versions, strict=True):
            own, other = differences(response, each, models)
            assert own < 1e-4
            crossed += [other] if each.max() > each.min() else []
    assert len(set(seeds)) == len(seeds) and {int(seed) for some in in_flight.values() for seed in some} <= set(seeds)
    assert len(crossed) >= len(POINTS) and max(crossed) > 0.01


def differences(response: dict[str, Any], versions: Int32Array, models: dict[int, TinyModel]) -> tuple[float, float]:
    """Return the largest difference of a token's log-prob from what the weights of its version give, and from what
    those of the response's other versions give."""
    own, other = [0.0], [0.0]
    for version in np.unique(versions):
        expected = models[version].log_probs(response["prompt_token_ids"], response["response_token_ids"])
        found = np.abs(response["log_probs"] - expected)
        own += found[versions == version].tolist()
        other += found[versions != version].tolist()
    return max(own), max(other)


def weights_of(run: Path, version: int) -> TinyModel:
    folder = run / f"hf_step_{version:06d}" if version else QUICKSTART / "base_model"
    return TinyModel(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    """Return a step's responses; they are to the requests of an undisturbed run, in its order."""
    rows: list[dict[str, Any]] = parquet.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
    places = [(prompt, sample) for prompt in range(PROMPTS) for sample in range(GROUP)]
    roll_out = derive_seed(1, "rollout", step - 1)
    assert [row["seed"] for row in rows] == [request_seed(roll_out, *place) for place in places]
    return rows


def versions_of(response: dict[str, Any]) -> Int32Array:
    """Return the version of each token, [n]; they never fall, and each span has a token."""
    tokens, spans = len(response["response_token_ids"]), response["versions"]
    starts = [span["first_token"] for span in spans]
    lengths = np.diff([*starts, tokens])
    versions = np.array([span["version"] for span in spans], np.int32)
    assert starts[0] == 0 and lengths.min() > 0 and (np.diff(versions) >= 0).all()
    return np.repeat(versions, lengths)
