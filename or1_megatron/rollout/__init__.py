"""Completions from vLLM engines, judged and grouped.

client                            the loop's view of the manager, on rank 0
manager                           sends requests to engines, completions to verifiers, groups back to the loop
scheduler, request_plan           which engine samples which request, and when a rollout is over; no Ray
engine_pool, engine_group         the engines as Ray actors: started, replaced, called together
engine, engine_thread, worker     one vLLM engine; it pauses requests and drops its prefix cache over a handoff
engine_args, speculation          further arguments of vLLM, drafts among them
cluster, gpus, ray_errors         Ray: start, GPUs by node, what a failed call means
verifier_actors                   the verifiers' workers on several nodes
engine_sampler, openai_sampler    sampling for evaluation and data: our engines, or any OpenAI-compatible server
"""
