"""Prometheus: what rank 0 serves, read by Prometheus's own parser, and the Grafana dashboard's queries.

``rollout/test_engine.py`` tests the engines' part. Not proven here: how the dashboard looks.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from or1_megatron.config.schema import TrackConfig
from or1_megatron.runtime.trackers import PrometheusTracker, check_trackers, prometheus_name
from or1_megatron.schemas.metrics import METRICS
from or1_verify.errors import UserError


def test_rank_0_serves_the_newest_values() -> None:
    """A metric that the newest step lacks keeps its value. Two names that Prometheus writes alike are one."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for wrong in (port, 70_000):
            with pytest.raises(
                UserError, match=f"prometheus_port: '{wrong}' cannot be used: O.*; it needs a free port"
            ):
                check_trackers(TrackConfig(prometheus_port=wrong))
    check_trackers(TrackConfig(prometheus_port=port))
    tracker = PrometheusTracker(port, Path("runs/one"), {})
    tracker.log(1, {"entropy/sampled": 0.5, "evaluation/pass@16": 0.75, "a b": 1.0})
    tracker.log(2, {"entropy/sampled": 0.25, "a/b": 2.0})
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    tracker.close()
    values = {name: [sample.value for sample in family.samples] for name, family in families.items()}
    assert values == {"or1_step": [2], "or1_entropy_sampled": [0.25], "or1_evaluation_pass_16": [0.75], "or1_a_b": [2]}
    assert families["or1_step"].samples[0].labels == {"run": "one"}
    assert families["or1_entropy_sampled"].documentation.endswith("(nats/token)")


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "or1.json").read_text())
    assert {panel["id"] for panel in board["panels"]} == set(range(1, len(board["panels"]) + 1))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"\bor1_\w+", " ".join([*queries, board["templating"]["list"][1]["query"]])))
    assert asked <= {prometheus_name(name) for name in ["step", *(metric.name for metric in METRICS)]}
