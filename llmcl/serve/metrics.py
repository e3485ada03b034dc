"""Server metrics for Prometheus. Names beginning with `llamacpp:` mean the same as in llama-server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmcl.engine import engine_metrics

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TBT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Counters of one server, in a separate registry.

    engine: returns the engine's counters; None before the engine is there. places: returns how many sequences are
    running and how many wait.
    """

    def __init__(
        self, engine: Callable[[], engine_metrics.EngineMetrics | None], places: Callable[[], tuple[int, int]]
    ) -> None:
        registry = self._registry = CollectorRegistry()
        self.tokens_predicted = Counter("llamacpp:tokens_predicted", "Tokens of all answers.", registry=registry)
        self.predicted_seconds = Counter(
            "llamacpp:tokens_predicted_seconds",
            "Seconds from first tokens to last ones.",
            registry=registry,
        )
        self.requests = Counter(
            "llmcl_requests",
            "Requests by path and status; 499: the client left.",
            ["api", "status"],
            registry=registry,
        )
        self.ttft, self.tbt = engine_metrics.Histogram(_TTFT_S), engine_metrics.Histogram(_TBT_S)
        registry.register(_Times(self))
        registry.register(_Places(places))
        registry.register(_OfEngine(engine))

    def show(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Times(Collector):
    """Histograms updated for each token; prometheus_client's own are slower."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield _histogram("llmcl_ttft_seconds", "Time to first token, waiting included.", self._metrics.ttft)
        yield _histogram("llmcl_tbt_seconds", "Time between two tokens.", self._metrics.tbt)


class _Places(Collector):
    """How many sequences are under way, counted when scraped."""

    def __init__(self, places: Callable[[], tuple[int, int]]):
        self._places = places

    def collect(self) -> Iterator[Metric]:
        processing, deferred = self._places()
        yield GaugeMetricFamily("llamacpp:requests_processing", "Sequences being answered.", value=processing)
        yield GaugeMetricFamily("llamacpp:requests_deferred", "Sequences that wait for a place.", value=deferred)


class _OfEngine(Collector):
    """The engine's counters as Prometheus metrics, read when scraped."""

    def __init__(self, engine: Callable[[], engine_metrics.EngineMetrics | None]):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        if (stats := self._engine()) is None:
            return
        counters: tuple[tuple[str, str, float], ...] = (
            ("llamacpp:prompt_tokens", "Tokens of prompts that steps read: cached ones are none.", stats.prompt_tokens),
            ("llamacpp:prompt_seconds", "Seconds from the beginning of requests to first tokens.", stats.prompt_s),
            ("llamacpp:n_decode", "Steps of the model.", stats.steps),
            ("llmcl_cached_prompt_tokens", "Tokens of prompts that the prefix cache held.", stats.cached_tokens),
            ("llamacpp:spec_decode_num_draft_tokens", "Tokens of drafts that steps verified.", stats.drafted_tokens),
            ("llamacpp:spec_decode_num_accepted_tokens", "Tokens of these that were right.", stats.accepted.sum),
            ("llmcl_preemptions", "Requests that gave their pages to others for a while.", stats.preemptions),
        )
        for name, meaning, value in counters:
            yield CounterMetricFamily(name, meaning, value=value)
        busy = stats.step_sequences / stats.steps if stats.steps else 0.0
        yield GaugeMetricFamily("llamacpp:n_busy_slots_per_decode", "Sequences that a step extends.", value=busy)
        yield _histogram("llmcl_queue_seconds", "From a request's arrival to its beginning.", stats.queue_s)
        yield _histogram("llmcl_cached_tokens", "Tokens of a prompt that the prefix cache held.", stats.cached)
        yield _histogram("llmcl_accepted_tokens", "Tokens of a draft that were right.", stats.accepted)
        yield _histogram("llmcl_step_rows", "Rows of a step: tokens that it computes.", stats.step_rows)


def _histogram(name: str, meaning: str, found: engine_metrics.Histogram) -> Metric:
    counts, total, buckets = [*found.counts], 0, []
    for bound, count in zip((*found.bounds, float("inf")), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=found.sum)
