"""A peer's metrics in Prometheus's text format, read from the peer at each scrape.

All names begin with `starling_`, and all samples carry the label `run`, the first 12 digits of the run's id. A value
that is not known is left out. Counters begin at 0 with each incarnation of the peer, as Prometheus expects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from node.reporting.event_feed import BUCKETS_SECONDS, SUMS, Histogram, RunCounters
from node.reporting.status import STATES, Status

MAX_PEER_LABELS = 64
OUTCOMES = ("committed", "alone", "skipped", "undecided", "superseded", "fork")

Samples = Iterable[tuple[Mapping[str, str], float]]  # (labels, value) pairs of one metric


def metrics_text(
    status: Status,
    counters: RunCounters,
    *,
    info: Mapping[str, str],
    network_bytes: Mapping[tuple[str, str], int] = MappingProxyType({}),
    refused: Mapping[str, int] = MappingProxyType({}),
    restarts: Mapping[str, int] = MappingProxyType({}),
    temperature_celsius: float = math.nan,
) -> bytes:
    """All metrics of a peer, each with the label `run`.

    `info`: labels of the constant metric `starling_info`. `network_bytes` are by direction and class of traffic,
    `refused` by part of the peer, `restarts` by process.
    """
    metrics = [
        _gauge("info", "Constant 1; its labels describe the peer.", [(info, 1.0)]),
        _gauge("state", "1 for the peer's present state, else 0.", _one_hot(status.state)),
        *_of_status(status),
        *_of_rounds(counters),
        _counter(
            "network_bytes",
            "Bytes sent and received, by class of traffic.",
            [({"direction": way, "class": kind}, float(count)) for (way, kind), count in sorted(network_bytes.items())],
        ),
        _counter("refused", "Peers, streams and records that were refused.", _by("where", refused)),
        _counter("process_restarts", "How often a process of the peer was replaced.", _by("process", restarts)),
        _gauge("temperature_celsius", "Temperature celsius.", [({}, temperature_celsius)]),
    ]
    for each in metrics:
        each.samples = [one._replace(labels={"run": status.run_id[:12], **one.labels}) for one in each.samples]
    registry = CollectorRegistry()  # not the global one, which has metrics of this process
    registry.register(_Collected(metrics))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _gauge(name: str, text: str, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"starling_{name}", text), samples, "")


def _counter(name: str, text: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(f"starling_{name}", text), samples, "_total")


def _filled(family: Metric, samples: Samples, suffix: str) -> Metric:
    """Samples that are not finite are left out."""
    for labels, value in samples:
        if math.isfinite(value):
            family.add_sample(family.name + suffix, dict(labels), value)
    return family


def _histogram(name: str, text: str, values: Histogram) -> Metric:
    family = HistogramMetricFamily(f"starling_{name}", text, labels=[])
    bounds = [*map(str, BUCKETS_SECONDS), "+Inf"]
    family.add_metric([], list(zip(bounds, accumulate(values.counts), strict=True)), values.sum_seconds)
    return family


def _by(label: str, counts: Mapping[str, int]) -> Samples:
    return [({label: name}, float(count)) for name, count in sorted(counts.items())]


def _one_hot(state: str) -> Samples:
    return [({"state": each}, float(each == state)) for each in STATES]


def _of_status(status: Status) -> Iterator[Metric]:
    unknown, syncing = math.nan, status.syncing
    values = {
        "round": ("Number of the round, from 1.", status.round + 1),
        "rounds": ("Number of rounds in the run.", status.rounds or unknown),
        "loss_nats": ("Training loss per token.", status.loss),
        "held_out_loss_nats": ("Loss per token on data that no peer trains on.", status.held_out_loss),
        "spread_ratio": ("Distance of the furthest peer from the mean, as a share of the mean.", status.spread),
        "spread_limit_ratio": ("The run's limit of the spread.", status.spread_limit),
        "tokens_per_second": ("Tokens trained per second.", status.tokens_per_second),
        "eta_seconds": ("Time until the last round is done.", _or_nan(status.eta_seconds)),
        "checkpoint_age_seconds": ("Age of the newest checkpoint.", _or_nan(status.checkpoint_age_seconds)),
        "resident_memory_bytes": ("Memory of the peer's processes.", status.rss_bytes),
        "loop_lag_p99_seconds": ("Lag of the event loop since the last report.", status.loop_lag_p99_seconds),
        "sync_bytes": ("Bytes of the state that have arrived.", syncing.bytes_here if syncing else unknown),
        "sync_bytes_whole": ("Bytes of the whole state.", syncing.bytes_whole if syncing else unknown),
        "joiners": ("Joiners that download this peer's state.", status.joiners),
        "stage": ("Stage of this peer.", status.stage),
        "stages": ("Number of stages.", status.stages),
    }
    for name, (text, value) in values.items():
        yield _gauge(name, text, [({}, float(value))])
    live = [each for each in status.peers if each.live]
    counts = [({"live": "1"}, float(len(live))), ({"live": "0"}, float(len(status.peers) - len(live)))]
    yield _gauge("peers", "Other peers that are known.", counts)
    yield _gauge("roster_members", "Other members.", [({}, float(sum(each.member for each in status.peers)))])
    shown = sorted(status.peers, key=lambda each: (not each.live, each.peer))[:MAX_PEER_LABELS]
    rounds = [({"peer": each.peer}, float(each.round + 1)) for each in shown]
    yield _gauge("peer_round", f"Round of another peer; at most {MAX_PEER_LABELS} peers.", rounds)


def _of_rounds(counters: RunCounters) -> Iterator[Metric]:
    # Also those that did not occur: an alert on a counter that does not exist never fires.
    names = sorted({*OUTCOMES, *counters.rounds})
    outcomes = [({"outcome": outcome}, float(counters.rounds[outcome])) for outcome in names]
    yield _counter("rounds_done", "Rounds that ended, by outcome.", outcomes)
    for name, (text, _) in SUMS.items():
        yield _counter(name, text, [({}, float(counters.sums[name]))])
    yield _histogram("round_seconds", "Duration of a round.", counters.round_seconds)
    yield _histogram("averaging_seconds", "Duration of a round's averaging.", counters.average_seconds)
    if last := counters.last:
        yield _gauge("open_files", "Open file descriptors.", [({}, float(last.open_files))])
        yield _gauge("tasks", "Tasks of the event loop.", [({}, float(last.tasks))])
        longest = "Longest lag of the event loop in the last round."
        yield _gauge("loop_lag_max_seconds", longest, [({}, last.loop_lag_max_seconds)])


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
