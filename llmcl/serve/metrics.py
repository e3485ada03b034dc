"""What a server counts, for Prometheus. Names that begin with `llamacpp:` mean what they mean in llama-server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TBT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.prompt_tokens = Counter("llamacpp:prompt_tokens", "Tokens of all prompts.", registry=registry)
        self.tokens_predicted = Counter("llamacpp:tokens_predicted", "Tokens of all answers.", registry=registry)
        self.predicted_seconds = Counter(
            "llamacpp:tokens_predicted_seconds",
            "Seconds from first tokens to last ones.",
            registry=registry,
        )
        self.processing = Gauge("llamacpp:requests_processing", "Sequences being answered.", registry=registry)
        self.deferred = Gauge("llamacpp:requests_deferred", "Sequences that wait for a place.", registry=registry)
        self.requests = Counter(
            "llmcl_requests",
            "Requests by path and status; 499: the client left.",
            ["api", "status"],
            registry=registry,
        )
        self.ttft = Histogram(
            "llmcl_ttft_seconds", "Time to first token, waiting included.", buckets=_TTFT_S, registry=registry
        )
        self.tbt = Histogram("llmcl_tbt_seconds", "Time between two tokens.", buckets=_TBT_S, registry=registry)

    def show(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)
