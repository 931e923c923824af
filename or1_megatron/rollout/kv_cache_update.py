"""What a weight update has to do about responses in flight in a vLLM engine: they stop, and resume after it.

Nothing of an in-process engine runs between two iterations, so it is paused by not stepping it. Two things remain to be
done: ending the iterations that asynchronous scheduling has begun, and dropping caches that the old weights computed.
"""

from __future__ import annotations

from typing import Any, Literal

KvCachePolicy = Literal["recompute", "keep"]
"""For responses in flight. recompute: the new weights read prompt and response again before they resume, so that every
token's log-prob is that of its version's model given all tokens before it. keep: the old keys and values stay, which is
cheaper, but the tokens that follow are sampled from no version's model. New requests never read either."""


def drain(engine: Any) -> list[Any]:
    """Finish the iterations that are under way, with the old weights, and return their outputs.

    Args:
        engine: vLLM's ``LLMEngine``, in process.
    """
    engine.sleep(level=0, mode="keep")  # only the scheduler: no iteration is begun
    under_way = engine.engine_core.engine_core.batch_queue  # None without asynchronous scheduling
    outputs: list[Any] = []
    while under_way:
        outputs += engine.step()
    engine.wake_up(tags=["scheduling"])
    return outputs


def forget(engine: Any, policy: KvCachePolicy, who: str) -> None:
    """Drop the caches that the old weights have computed, as ``policy`` says.

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
