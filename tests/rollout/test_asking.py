"""How many requests an engine is given; sampling itself is tried with real engines in data/ and evaluate/."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from or1_megatron.rollout import engine_sampler as asking


def test_an_engine_has_half_a_second_ahead_but_not_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long responses that started together are cut off together: 64 in an instant are no rate."""
    now = [0.0]
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fast, slow = asking._Engine(None, 0, 64), asking._Engine(None, 1, 64)
    assert fast.room == slow.room == 64 + 8 and fast.short
    now[0] = 2.0
    fast.answered(600)
    assert fast.room == 64 + 150
    now[0] = 600.0
    slow.answered(64)
    assert slow.room == 64 + 8
