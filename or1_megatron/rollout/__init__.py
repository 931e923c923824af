"""Rollouts: samples responses from vLLM engines under Ray, has them verified, and returns them in groups.

``manager`` detects a lost engine during a rollout, ``engine_group`` during a handoff. ``engine_pool`` restarts the
engine, and ``scheduler`` requests the engine's unfinished responses again. ``client`` detects and restarts a lost
RolloutManager; engines give their finished responses to the new manager (``engine_thread.switch_manager``).
"""
