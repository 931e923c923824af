"""Extends vLLM's workers with sampling by seeds and our weight transfer: ``engine.WORKER_EXTENSION``.

vLLM imports this module in every worker process, before the worker makes its message queues and looks up its
weight-transfer backend. So the backend is registered here, which also works under tensor parallelism.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler as VllmSampler

from or1_megatron.handoff.vllm import receiver
from or1_megatron.handoff.vllm.reload import put_back
from or1_megatron.kernels.sampling import sample
from or1_megatron.rollout.engine import save_host_memory, wait_without_spinning
from or1_megatron.rollout.request_plan import row_keys
from or1_megatron.rollout.speculation import check_drafts

receiver.register()
wait_without_spinning()
save_host_memory()


class SeededSampler(VllmSampler):
    """Replaces vLLM's sampler, and draws a token by the request's seed and the token's position in the response.

    The seed is ``extra_args["seed"]`` of the request's parameters. A row of vLLM's table of log-probs gets three fp32
    numbers: token id (exact below 2**24), the token's log-prob, and the whole distribution's entropy in nats. If a
    request has ``logprob_token_ids`` (one id), the third number is this id's log-prob at temperature 1 instead.
    Requests with penalties, bad words or other logits processors do not occur.
    """

    def __init__(self, runner: Any) -> None:
        """``runner``: vLLM's V1 model runner, whose batch is sampled."""
        super().__init__("processed_logprobs")
        self._runner = runner
        self._metadata: Any = None
        self._seeds = np.empty(0, dtype=np.uint64)

    def forward(self, logits: Tensor, sampling_metadata: Any) -> SamplerOutput:
        """Draw a token of each request from ``logits`` [B, V]; ``sampling_metadata``: vLLM's SamplingMetadata."""
        return self.draw(logits, sampling_metadata, slice(None), 0)

    def draw(self, logits: Tensor, sampling: Any, requests: Any, ahead: Any) -> SamplerOutput:
        """Draw a token per row of ``logits`` [R, V].

        Row r gives a token of request ``requests[r]``, ``ahead[r]`` positions after the request's next token.
        """
        batch = self._runner.input_batch
        if sampling is not self._metadata:  # vLLM makes another one when requests come, go or change places
            params = (self._runner.requests[name].sampling_params for name in batch.req_ids)
            seeds = [(each.extra_args or {}).get("seed", 0) for each in params]
            self._metadata, self._seeds = sampling, np.array(seeds, dtype=np.uint64)
        positions = (batch.num_tokens_no_spec - batch.num_prompt_tokens)[: len(self._seeds)]
        keys = row_keys(self._seeds[requests], positions[requests] + ahead)
        given = (sampling.temperature, sampling.top_k, sampling.top_p)
        temperatures, *cuts = (None if each is None else each[requests] for each in given)
        if temperatures is None:
            temperatures = torch.zeros(len(logits), device=logits.device)
        floors = None
        if cuts != [None, None]:
            scaled = logits.float() / temperatures.where(temperatures > 0, 1.0)[:, None]
            floors = logits.masked_fill(apply_top_k_top_p(scaled, *cuts) == -torch.inf, torch.inf).amin(dim=1)
        found = sample(logits, torch.from_numpy(keys).to(logits.device, non_blocking=True), temperatures, floors)
        table = torch.stack((found.tokens.float(), found.log_probs, found.entropies), dim=1)
        for request, (token,) in (sampling.logprob_token_ids or {}).items():
            row = int((np.arange(len(self._seeds))[requests] == request).argmax())
            table[row, 2] = logits[row].float().log_softmax(dim=0)[token]
        tokens = found.tokens.int()[:, None]
        return SamplerOutput(tokens, LogprobsTensors(tokens, table, found.tokens))


class WorkerExtension:
    """Methods of a vLLM worker that ``collective_rpc`` calls by name."""

    model_runner: Any  # vLLM's, of the worker that this is mixed into
    model_config: Any
    _weight_update_active: bool

    def abandon_weight_update(self) -> None:
        """Give up a weight update that will not be completed. Otherwise vLLM would refuse to begin another update.

        Layers that were not loaded keep their weights, so the model mixes old and new until the next update.
        """
        self._weight_update_active = False
        put_back(self.model_runner.model, self.model_config)

    def sample_by_seeds(self) -> None:
        """Sample with ``SeededSampler`` from now on, also with drafted tokens."""
        runner = self.model_runner
        runner.sampler = SeededSampler(runner)
        runner.rejection_sampler = partial(check_drafts, runner.sampler)
