"""Tries an engine on the device of this process: log-probs, sleep and wake, and handoffs of all tensors of a folder.

python lab/benchmarks/gpu/first_run/engine.py MODEL DTYPE
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.sender import WeightSender
from or1_megatron.rollout.cluster import start_ray, stop_ray
from or1_megatron.rollout.engine_group import result_of
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.runtime import message
from or1_megatron.selftest.models import one_rank
from or1_megatron.selftest.setups import ENGINE_TOKENS, handoff_config
from or1_megatron.trainer.placement import engine_places
from or1_megatron.types import Prompt, Request, Sampling
from or1_megatron.weights.holdings import Holding, whole
from or1_verify.types import Problem


def draw(engine):
    """Return (prompt, response, the engine's log-probs) of 16 random prompts, in their order."""
    rng, problem = np.random.default_rng(0), Problem("0", "first run", "math", (), "", {}, "first run")
    prompts = [rng.integers(2, 100, 2 + 2 * number, dtype=np.int32) for number in range(16)]
    sampling, done = Sampling(1.0, 1.0, ENGINE_TOKENS - 32), {}
    requests = [Request(Prompt(problem, ids), 0, sampling, seed) for seed, ids in enumerate(prompts)]
    result_of(engine.submit.remote(message.pack(requests)), 0, "take requests")
    while len(done) < len(requests):
        harvest = message.unpack(result_of(engine.harvest.remote(5.0), 0, "sample"))
        done |= {completion.seed: completion for completion in harvest.completions}
    return [(ids, done[seed].token_ids, done[seed].log_probs) for seed, ids in enumerate(prompts)]


model, dtype, cuda = Path(sys.argv[1]), sys.argv[2], torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
config = handoff_config(model, "colocated", 1, 1, cuda)
start_ray(None, "first-run")
one_rank()
pool = EnginePool(config.rollout, model, dtype, ENGINE_TOKENS, "first-run", not cuda, engine_places(config))
pool.wait_ready()
drawn = draw(pool.handles[0])
engines = pool.control(300.0)
engines.sleep()
oracle, apart = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device), []
for prompt, response, log_probs in drawn:
    ids = torch.tensor(np.concatenate([prompt, response])[None], device=device).long()
    with torch.no_grad():
        scores = oracle(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    apart += np.abs(scores[-log_probs.size :] - log_probs).tolist()
print(f"=> log-probs, and those of transformers in fp32, differ by {np.mean(apart):.5f} nats, at most {max(apart):.4f}")
del oracle
torch.cuda.empty_cache()
tensors = {}
for file in model.glob("*.safetensors"):
    tensors |= {name: each.to(getattr(torch, dtype)) for name, each in load_file(file, device).items()}
weights = SimpleNamespace(  # ``interfaces.PolicyWeights`` of one rank
    ranks=1,
    metadata=lambda: [(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()],
    holdings=lambda: [Holding(name, whole(each.shape), (0,)) for name, each in tensors.items()],
    read=lambda name, box: tensors[name][tuple(slice(*edge) for edge in box)],
    from_rank_0=lambda value: value,
)
engines.wake_up(["weights"])
sender = WeightSender(weights, 0, HandoffConfig(timeout_s=300.0), engines)
for version in (1, 2, 3):
    began_s = time.perf_counter()
    sent = sender.send(version)
    print(f"=> handoff {version}, checksums equal: {sent / 1e9:.3f} GB in {time.perf_counter() - began_s:.3f} s")
engines.wake_up(["kv_cache"])
engines.resume_generation(3)
before, after = ([response.tolist() for _, response, _ in each] for each in (drawn, draw(pool.handles[0])))
print(f"=> after sleep and handoff {sum(map(list.__eq__, before, after))} of {len(before)} responses are equal")
sender.close()
pool.close()
stop_ray()
sys.exit(before != after)
