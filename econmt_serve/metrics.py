"""Metrics of the server, for Prometheus."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 1.0, 2.0, 5.0, 10.0, 30.0)
_SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters and histograms of one server, and figures of its process where the system has them."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.requests = counter(
            "econmt_requests_total", "Requests by path and HTTP status.", ["path", "status"]
        )
        self.seconds = histogram(
            "econmt_request_seconds", "From a request's first byte to its answer.", ["path"], buckets=_SECONDS
        )
        self.sentences = counter("econmt_sentences_total", "Sentences translated.")
        self.source_tokens = counter("econmt_source_tokens_total", "Their tokens.")
        self.batches = histogram(
            "econmt_batch_sentences", "Sentences translated together.", buckets=_SENTENCES
        )
        self.batch_seconds = histogram("econmt_batch_seconds", "For translating a batch.", buckets=_SECONDS)
        self.waiting = Gauge("econmt_waiting_sentences", "Sentences that wait.", registry=registry)
        self.given_up = counter(
            "econmt_given_up_total", "Sentences whose client left before they were translated."
        )
        self.bugs = counter("econmt_failed_batches_total", "Batches that an error of this program ended.")
        self.reloads = counter("econmt_reloads_total", "Models loaded anew.", ["result"])

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
