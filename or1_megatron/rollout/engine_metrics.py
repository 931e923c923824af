"""Serves vLLM's own metrics of one engine to Prometheus, from what vLLM's core returns (``track.prometheus_port``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import start_http_server


class EngineMetrics:
    """Feeds an LLMEngine's metrics logger. vLLM's output processor would do this, but our engine does not use it."""

    def __init__(self, engine: Any, port: int) -> None:
        self._engine, self.fault = engine, ""
        try:  # the port was free when the run began; one that is taken since ends no run
            start_http_server(port)
        except OSError as error:
            self.fault = f"Prometheus cannot read this engine's metrics: port {port}: {error}"

    def record(self, iteration: Any, in_flight: Mapping[str, Any]) -> None:
        """Count an iteration of vLLM's core. ``in_flight``: requests by name, including those just ended."""
        from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats

        counted, loras = IterationStats(), LoRARequestStates()
        for output in iteration.outputs:
            if (flying := in_flight.get(output.request_id)) is None:  # of a probe
                continue
            stats, request = flying.stats or RequestStateStats(arrival_time=flying.started_s), flying.request
            first, flying.stats = flying.stats is None, stats
            counted.update_from_output(output, iteration.timestamp, first, stats, loras, None)
            if output.finish_reason is not None:
                sizes = len(request.prompt.token_ids), request.sampling.max_response_tokens
                counted.update_from_finished_request(output.finish_reason, output.request_id, *sizes, stats)
        self._engine.logger_manager.record(iteration.scheduler_stats, counted)
