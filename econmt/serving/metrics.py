"""Metrics of the server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 1.0, 2.0, 5.0, 10.0, 30.0)
_SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters and histograms of one server, and figures of its process where the system has them."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "econmt_requests_total",
            "Requests by path and HTTP status.",
            ["path", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "econmt_request_seconds",
            "From a request's first byte to its answer.",
            ["path"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.sentences = Counter("econmt_sentences_total", "Sentences translated.", registry=registry)
        self.source_tokens = Counter("econmt_source_tokens_total", "Their tokens.", registry=registry)
        self.batches = Histogram(
            "econmt_batch_sentences", "Sentences translated together.", registry=registry, buckets=_SENTENCES
        )
        self.batch_seconds = Histogram(
            "econmt_batch_seconds", "For translating a batch.", registry=registry, buckets=_SECONDS
        )
        self.waiting = Gauge("econmt_waiting_sentences", "Sentences that wait.", registry=registry)
        self.given_up = Counter(
            "econmt_given_up_total",
            "Sentences whose client left before they were translated.",
            registry=registry,
        )
        self.bugs = Counter(
            "econmt_failed_batches_total", "Batches that an error of this program ended.", registry=registry
        )
        self.reloads = Counter("econmt_reloads_total", "Models loaded anew.", ["result"], registry=registry)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
