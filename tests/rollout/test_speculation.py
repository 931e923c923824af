"""Drafted tokens change nothing in what is sampled: real vLLM engines on CPU, fp32, against transformers and engines
that draft nothing, and the sampler alone against an exact distribution; and the metrics that such an engine serves.

The drafts are vLLM's n-grams. Not proven: anything about time, other methods, or GPUs.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from engine_fixtures import MAX_MODEL_TOKENS, RUN_ID, TinyModel, decode, requests, rollout_config
from ports import unused_port
from prometheus_client.parser import text_string_to_metric_families
from rigs import in_engine
from vllm.v1.outputs import LogprobsLists

from or1_megatron.rollout.engine import _accepted as of_response
from or1_megatron.rollout.engine import pass_rows_as_bytes
from or1_megatron.rollout.engine_metrics import EngineMetrics
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.rollout.speculation import check_drafts
from or1_megatron.rollout.worker import SeededSampler
from or1_megatron.runtime.trackers import prometheus_name
from or1_megatron.schemas.metrics import METRICS
from or1_megatron.types import Completion, Sampling

TINY_P = 1e-4  # seeds are fixed: a test that passes once passes always


@pytest.fixture(scope="module")
def drafting(tiny_model: TinyModel, ray_cluster: None) -> Iterator[EnginePool]:
    """One engine that drafts from a single token's earlier occurrence: often wrong, and sometimes right.

    Its iterations take so few tokens that prompts go in in pieces.
    """
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    config = rollout_config(engines=1, engine_args={"speculative_config": drafts, "max_num_batched_tokens": 136})
    where, port = f"{RUN_ID}-drafts", unused_port()
    pool = EnginePool(config, tiny_model.folder, "float32", MAX_MODEL_TOKENS, where, on_cpu=True, metrics_port=port)
    pool.wait_ready()
    yield pool
    pool.close()


def chi_square_p(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the chance of a larger chi-square statistic; cells that expect fewer than 5 are taken together."""
    expected = probabilities * observed.sum()
    rare = expected < 5
    cells = [(observed[~rare], expected[~rare]), (observed[rare].sum(keepdims=True), expected[rare].sum(keepdims=True))]
    seen, wanted = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    half = torch.tensor([(len(seen) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.7, 1.0), (1.3, 0.8)], ids=["greedy", "1", "0.7", "top_p"]
)
def test_the_same_tokens_and_log_probs_as_without_drafts(
    tiny_model: TinyModel, engine_pool: EnginePool, drafting: EnginePool, temperature: float, top_p: float
) -> None:
    """Token by token for the same seeds; log-probs against transformers at the bound of the other engines."""
    sent = requests(Sampling(temperature, top_p, 48), each=8)
    with_drafts, without = decode(drafting.handles[0], sent), decode(engine_pool.handles[0], sent)
    for request, completion, plain in zip(sent, with_drafts, without, strict=True):
        assert completion.token_ids.tolist() == plain.token_ids.tolist()
        assert completion.finish_reason == plain.finish_reason and completion.text == plain.text
        ids = request.prompt.token_ids.tolist()
        expected = tiny_model.log_probs(ids, completion.token_ids.tolist(), temperature or 1.0)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
        assert (plain.drafted_tokens, plain.accepted_tokens) == (0, 0)
    drafted, accepted = (sum(map(of, with_drafts)) for of in (drafted_tokens, accepted_tokens))
    assert 0 < accepted < drafted, "the test needs drafts of both kinds"


def test_an_argument_of_the_run_is_in_the_place_of_the_engines_own(drafting: EnginePool) -> None:
    def budget(engine: Any) -> int:
        return int(engine._engine.vllm_config.scheduler_config.max_num_batched_tokens)

    assert in_engine(drafting.handles[0], budget) == 136


def served(pool: EnginePool) -> Counter[str]:
    """Return what Prometheus reads of the engine: sums over labels, by name."""
    found = Counter[str]()
    with urlopen(f"http://127.0.0.1:{pool._settings[0].metrics_port}/metrics") as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            found.update({name: sum(s.value for s in family.samples if s.name == name) for name, *_ in family.samples})
    return found


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}: " in EngineMetrics(None, port).fault


def test_vllm_s_metrics_are_those_of_the_responses(drafting: EnginePool) -> None:
    """All that the Grafana dashboard asks for exists, here or on rank 0. Not proven: how it looks."""
    assert in_engine(drafting.handles[0], lambda engine: engine.metrics_fault()) == ""
    before, sent = served(drafting), requests(Sampling(1.0, 1.0, 32), each=4, seed=70_000)
    made, after = decode(drafting.handles[0], sent), served(drafting)
    board = (Path(__file__).parents[2] / "docs" / "grafana" / "or1.json").read_text()
    asked = {query for panel in json.loads(board)["panels"] for query in re.findall(r"\b(?:vllm:|or1_)\w+", str(panel))}
    assert len(asked) > 40 and asked <= after.keys() | {"or1_step", *(prometheus_name(each.name) for each in METRICS)}
    grown = {name.removeprefix("vllm:"): after[name] - before[name] for name in after}
    assert grown["generation_tokens_total"] == sum(len(each.token_ids) for each in made)
    assert grown["prompt_tokens_total"] == sum(len(each.prompt.token_ids) for each in sent)
    assert grown["request_success_total"] == grown["e2e_request_latency_seconds_count"] == len(sent)
    assert grown["time_to_first_token_seconds_count"] == len(sent) and after["vllm:num_requests_running"] == 0


def drafted_tokens(completion: Completion) -> int:
    return completion.drafted_tokens


def accepted_tokens(completion: Completion) -> int:
    return completion.accepted_tokens


@pytest.mark.parametrize(("histogram", "tokens", "accepted"), [([2, 1], 8, 1), ([0, 0, 0, 1], 3, 2), ([1], 1, 0)])
def test_accepted_tokens_are_of_the_response(histogram: list[int], tokens: int, accepted: int) -> None:
    """The second response ends at the second of three drafts that a pass accepted: all three are in vLLM's count."""
    assert of_response(histogram, tokens) == accepted


def test_prompts_are_scored_beside_drafts(tiny_model: TinyModel, drafting: EnginePool) -> None:
    sequences = [np.array(ids, dtype=np.int32) for ids in ([5, 9, 30, 1, 1, 0, 12], [7, 8])]
    sent = requests(Sampling(1.0, 1.0, 60), each=8, seed=50_000)

    def score(engine: Any) -> tuple[list[Any], int]:
        engine.submit(sent)
        for _ in range(10):
            engine._iterate()
        scores = engine.score_prompts(sequences)
        under_way = engine.pending
        engine.abort_all()
        return scores, under_way

    scores, under_way = in_engine(drafting.handles[0], score)
    assert under_way > 0
    for values, ids in zip(scores, sequences, strict=True):
        np.testing.assert_allclose(values, tiny_model.log_probs(ids[:1].tolist(), ids[1:].tolist()), atol=1e-4)


def test_what_a_handoff_drops_under_way_changes_no_token(engine_pool: EnginePool, drafting: EnginePool) -> None:
    """The weights stay; tests/handoff/test_in_flight.py changes them, without drafts."""
    sent = requests(Sampling(1.0, 1.0, 40), each=8, seed=90_000)

    def interrupted(engine: Any) -> dict[int, Completion]:
        engine.submit(sent)
        for _ in range(8):
            engine._iterate()
        assert engine._engine.reset_prefix_cache(reset_running_requests=True)
        while engine._pending:
            engine._iterate()
        return {completion.seed: completion for completion in engine.step()}

    found = in_engine(drafting.handles[0], interrupted)
    for plain in decode(engine_pool.handles[0], sent):
        assert found[plain.seed].token_ids.tolist() == plain.token_ids.tolist()


VOCABULARY = 5
CHAIN = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5
"""Logits of the next token given the last one."""


def sampling_metadata(temperatures: torch.Tensor) -> Any:
    return SimpleNamespace(temperature=temperatures, top_p=None, top_k=None, logprob_token_ids=None)


def batch_of(walks: list[list[int]], going: Sequence[int]) -> SimpleNamespace:
    """Return the part of vLLM's batch that is read: walk i is request i, of which the first token is the prompt."""
    lengths = np.array([len(walks[i]) for i in going])
    return SimpleNamespace(req_ids=going, num_tokens_no_spec=lengths, num_prompt_tokens=np.ones_like(lengths))


def walk(temperatures: torch.Tensor, drafts: np.random.Generator | None, length: int) -> list[list[int]]:
    """Sample ``length`` tokens of the chain per request, with random drafts of 0 to 3 tokens in each pass."""
    count = len(temperatures)
    walks: list[list[int]] = [[0] for _ in range(count)]
    params = [SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"seed": seed})) for seed in range(count)]
    runner = SimpleNamespace(requests=params)
    sampler = SeededSampler(runner)
    while any(len(tokens) <= length for tokens in walks):
        going = [i for i in range(count) if len(walks[i]) <= length]
        runner.input_batch = batch_of(walks, going)
        given = [[] if drafts is None else drafts.integers(0, VOCABULARY, drafts.integers(4)).tolist() for _ in going]
        rows = [token for i, draft in zip(going, given, strict=True) for token in (walks[i][-1], *draft)]
        metadata = SimpleNamespace(
            num_draft_tokens=list(map(len, given)),
            draft_token_ids=torch.tensor([*itertools.chain(*given)], dtype=torch.int32),
        )
        output = check_drafts(sampler, metadata, None, CHAIN[rows], sampling_metadata(temperatures[going]))
        width = output.sampled_token_ids.shape[1]
        for place, (i, row) in enumerate(zip(going, output.sampled_token_ids.tolist(), strict=True)):
            kept = [token for token in row if token >= 0]
            assert row[: len(kept)] == kept
            scores = output.logprobs_tensors.logprobs[place * width : place * width + len(kept), 1]
            for token, score in zip(kept, scores.tolist(), strict=True):
                exact = torch.log_softmax(CHAIN[walks[i][-1]].double() / temperatures[i], dim=-1)[token]
                assert score == pytest.approx(float(exact), abs=1e-5)
                walks[i].append(token)
    return [tokens[1 : length + 1] for tokens in walks]


def test_the_sampler_draws_a_chain_as_it_is_and_as_without_drafts() -> None:
    """Chi-square over all 125 walks of three tokens, for two temperatures; and walk by walk for the same seeds."""
    count = 4_000
    temperatures = torch.tensor([1.0, 0.6]).repeat(count // 2)
    found = walk(temperatures, np.random.default_rng(1), 3)
    assert found == walk(temperatures, None, 3)
    for offset, temperature in enumerate((1.0, 0.6)):
        chain = (CHAIN.double() / temperature).softmax(dim=-1).numpy()
        walks = list(itertools.product(range(VOCABULARY), repeat=3))
        exact = np.array([chain[0, a] * chain[a, b] * chain[b, c] for a, b, c in walks])
        seen = Counter(map(tuple, found[offset::2]))
        observed = np.array([seen[each] for each in walks])
        assert chi_square_p(observed, exact) > TINY_P
        assert chi_square_p(observed, exact[::-1]) < TINY_P


@pytest.mark.parametrize("first_rows", [None, [0, 1, 4, 6]])
def test_rows_pass_as_the_bytes_of_vllms_own_slices(
    monkeypatch: pytest.MonkeyPatch, first_rows: list[int] | None
) -> None:
    """Rows of requests with one token each, and of requests with one, three and two after drafts."""
    table = np.random.default_rng(0).random((6, 3), dtype=np.float32)
    lists = LogprobsLists(np.zeros((6, 1), np.int32), table, np.zeros(6, np.int64), first_rows)
    asked = [(0, 1), (1, 3), (2, 2)] if first_rows else [(request, 1) for request in range(6)]
    whole = [lists.slice_request(*each).logprobs.tobytes() for each in asked]
    monkeypatch.setattr(LogprobsLists, "slice_request", LogprobsLists.slice_request)  # comes back after the test
    pass_rows_as_bytes()
    assert [lists.slice_request(*each) for each in asked] == whole
