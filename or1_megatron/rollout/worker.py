"""What we add to vLLM's workers: named in ``engine.WORKER_EXTENSION``, mixed into the worker class by vLLM.

vLLM imports this module in every worker process, before the worker makes its message queues and looks up its
weight-transfer backend. So registering our backend here makes it known there, under tensor parallelism too.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from or1_megatron.handoff.vllm import receiver
from or1_megatron.handoff.vllm.reload import put_back
from or1_megatron.rollout.engine import hold_less, wait_without_spinning
from or1_megatron.rollout.speculation import DraftSampler

receiver.register()
wait_without_spinning()
hold_less()


class FullDistributionLogProbs(torch.nn.Module):
    """Samples as vLLM's top-k/top-p sampler, and returns log-probs from before the cut.

    vLLM offers log-probs either before temperature or after top-p (renormalised over the nucleus). The importance
    ratio and the engine-vs-policy comparison need others: with temperature applied, over the whole vocabulary.
    """

    def __init__(self, sampler: torch.nn.Module) -> None:
        super().__init__()
        self.sampler = sampler

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample from ``logits`` [B, V], temperature applied. Returns (token ids [B], log-probs [B, V])."""
        if k is None and p is None:
            sampled, log_probs = self.sampler(logits, generators, k, p)
            return sampled, log_probs
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)  # first: the sampler masks logits in place
        sampled, _ = self.sampler(logits, generators, k, p)
        return sampled, log_probs


_DRAWN_AT_ONCE = 32


class RequestSeeds:
    """Draws each request's seeds, one per token, many at once.

    vLLM's sampler on CPU draws one at a time, which takes half of its time (benchmarks/decoding.py at a8bddd6). A
    generator's numbers do not depend on how many are drawn at once.
    """

    def __init__(self) -> None:
        self._drawn: WeakKeyDictionary[torch.Generator, deque[int]] = WeakKeyDictionary()

    def next(self, generator: torch.Generator) -> int:
        """Return what ``torch.randint(0, 2**31, (1,), generator=generator)`` would; nobody else draws from it."""
        drawn = self._drawn.get(generator)
        if not drawn:
            drawn = self._drawn[generator] = deque(_draw(_DRAWN_AT_ONCE, generator).tolist())
        return drawn.popleft()

    def of_batch(self, size: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
        """Return [B] seeds: those of requests without a generator of their own from torch's."""
        if len(generators) == size:
            return torch.tensor([self.next(generators[index]) for index in range(size)], dtype=torch.long)
        seeds = _draw(size, None)
        for index, generator in generators.items():
            seeds[index] = self.next(generator)
        return seeds


def _draw(count: int, generator: torch.Generator | None) -> torch.Tensor:
    return torch.randint(0, 2**31, (count,), generator=generator, dtype=torch.long)


class CpuSampler(torch.nn.Module):
    """Samples, to the bit, as vLLM's top-k/top-p sampler does on CPU with ``logprobs_mode="processed_logprobs"``."""

    def __init__(self) -> None:
        super().__init__()
        self._seeds = RequestSeeds()

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample from ``logits`` [B, V], temperature applied. Returns (token ids [B], log-probs [B, V])."""
        logits = apply_top_k_top_p(logits, k, p)
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
        seeds = self._seeds.of_batch(logits.shape[0], generators)
        return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), seeds), log_probs


class WorkerExtension:
    """Methods that ``collective_rpc`` reaches by name."""

    model_runner: Any  # vLLM's, of the worker that this is mixed into
    model_config: Any
    _weight_update_active: bool

    def abandon_weight_update(self) -> None:
        """Give up an update that will not be completed: vLLM would not begin another.

        Layers that were not loaded keep their weights, so that the model is a mixture until the next update.
        """
        self._weight_update_active = False
        put_back(self.model_runner.model, self.model_config)

    def draw_seeds_at_once(self) -> None:
        """Where vLLM samples as on CPU, sample with ``CpuSampler`` from now on; the results are the same."""
        inner = getattr(self.model_runner.sampler, "topk_topp_sampler", None)
        if inner is not None and inner.forward == inner.forward_cpu and not inner.use_fp64_gumbel:
            self.model_runner.sampler.topk_topp_sampler = CpuSampler()

    def keep_log_probs_of_full_distribution(self) -> None:
        """Make log-probs of requests with top_p < 1 those before the cut, from now on.

        Raises:
            RuntimeError: vLLM runs its V2 model runner, whose sampler is built differently.
        """
        sampler = self.model_runner.sampler
        inner = getattr(sampler, "topk_topp_sampler", None)
        if inner is None:
            raise RuntimeError(
                "top_p < 1 needs vLLM's V1 model runner (its V2 runner reports log-probs only after top-p): set "
                "VLLM_USE_V2_MODEL_RUNNER=0 in the engines' environment"
            )
        if not isinstance(inner, FullDistributionLogProbs):
            sampler.topk_topp_sampler = FullDistributionLogProbs(inner)

    def sample_drafts_as_without(self) -> None:
        """Draw each token as without drafts, from now on (``speculation``)."""
        self.model_runner.rejection_sampler = DraftSampler(self.model_runner.sampler)
