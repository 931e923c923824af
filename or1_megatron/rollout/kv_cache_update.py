"""What a weight update does to the responses that a vLLM engine is in the middle of: they stop, and go on with it.

Between two iterations nothing of an in-process engine runs, so not to step it is to pause it. Two things remain: what
asynchronous scheduling has under way, and caches that hold what the old weights computed.
"""

from __future__ import annotations

from typing import Any, Literal

KvCachePolicy = Literal["recompute", "keep"]
"""Of responses in flight. recompute: the new weights read prompt and response anew before they go on, so that every
token's log-prob is that of its version's model given all tokens before it. keep: the old keys and values stay; cheaper,
and what follows is sampled from no version's model. New requests never read what old weights computed."""


def drain(engine: Any) -> list[Any]:
    """Outputs of iterations that are under way, which the old weights compute; none is begun.

    Args:
        engine: vLLM's ``LLMEngine``, in process.
    """
    engine.sleep(level=0, mode="keep")  # of the scheduler alone
    under_way = engine.engine_core.engine_core.batch_queue  # None without asynchronous scheduling
    outputs: list[Any] = []
    while under_way:
        outputs += engine.step()
    engine.wake_up(tags=["scheduling"])
    return outputs


def forget(engine: Any, policy: KvCachePolicy, who: str) -> None:
    """Drop what the old weights have computed, as ``policy`` says.

    Raises:
        RuntimeError: vLLM did not drop it.
    """
    if policy == "recompute":
        if not engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(f"{who}: vLLM would not reset its prefix cache; some of its blocks are still in use")
        return
    # vLLM's own reset refuses while requests run. Blocks that lose their hashes stay with the requests that use them.
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    manager.evict_blocks({block.block_id for block in manager.block_pool.blocks})
