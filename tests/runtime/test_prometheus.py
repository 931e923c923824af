"""Prometheus: what rank 0 serves, read by Prometheus's own parser, a taken port, and the Grafana dashboard's queries.

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
from or1_megatron.runtime.record import RunRecord
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.runtime.trackers import check_trackers, prometheus_name
from or1_megatron.schemas.metrics import METRICS
from or1_verify.errors import UserError

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "or1.json"


def test_rank_0_serves_the_newest_values(tmp_path: Path) -> None:
    """A metric that the newest step lacks keeps its value. Two names that Prometheus writes alike are one."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"prometheus_port: '{port}' cannot be used: OSError: .*in use"):
            check_trackers(TrackConfig(prometheus_port=port))
    with pytest.raises(UserError, match="70000"):
        check_trackers(TrackConfig(prometheus_port=70000))
    record = RunRecord(RunFolder(tmp_path / "run"), TrackConfig(prometheus_port=port, tensorboard=False), {})
    record.log(1, {"entropy/sampled": 0.5, "evaluation/pass@16": 0.75, "a b": 1.0, "policy/grad_norm": float("nan")})
    record.log(2, {"entropy/sampled": 0.25, "a/b": 2.0})
    record._others[0]._calls.put(None)  # all rows are taken
    record._others[0]._thread.join()
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    values = {name: [sample.value for sample in family.samples] for name, family in families.items()}
    assert values.pop("or1_policy_grad_norm") == [pytest.approx(float("nan"), nan_ok=True)]
    assert values.pop("or1_memory_host")[0] > 1e6
    assert values == {"or1_step": [2], "or1_entropy_sampled": [0.25], "or1_evaluation_pass_16": [0.75], "or1_a_b": [2]}
    assert families["or1_step"].samples[0].labels == {"run": "run"}
    assert families["or1_entropy_sampled"].documentation.endswith("(nats/token)")
    record.close()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 20
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"\bor1_\w+", " ".join([*queries, board["templating"]["list"][1]["query"]])))
    assert asked <= {prometheus_name(name) for name in ["step", *(metric.name for metric in METRICS)]}
    assert all(query.count("(") == query.count(")") for query in queries)
