"""How many requests an engine is given; sampling itself is tried with real engines in data/ and evaluate/."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from or1_megatron.rollout import engine_sampler


def test_an_engine_has_half_a_second_ahead_but_not_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long responses that started together are cut off together: 64 in an instant are no rate."""
    now = [0.0]
    monkeypatch.setattr(engine_sampler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fast, slow = engine_sampler._EngineQueue(None, 0, 64), engine_sampler._EngineQueue(None, 1, 64)
    assert fast.room == slow.room == 64 + 8 and fast.is_short
    now[0] = 2.0
    fast.completed(600)
    assert fast.room == 64 + 150
    now[0] = 600.0
    slow.completed(64)
    assert slow.room == 64 + 8
