"""Kinds of Prometheus series, each written under every configured prefix at once. Torch-free.

No prefix means no series: every method is then a cheap no-op. Whoever writes a series does so from one thread.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_MANY = 128
"""From so many values on arrays cost less than a loop does, even where nothing else has used numpy for a while."""


class _Number(Protocol):
    def inc(self, amount: float) -> None: ...


class _MappedNumber:
    """One of the library's values in this process's mapped file. The library itself asks at every change whether the
    process was forked, which ours are not, takes a lock and looks up where the number is. There is no public way around
    that: this reads private attributes."""

    __slots__ = ("_doubles", "_place")

    def __init__(self, value: Any) -> None:
        file = value._file
        place = file._positions[value._key]
        self._doubles = memoryview(file._m).cast("d")  # stays that file when it grows
        self._place = place // self._doubles.itemsize

    def inc(self, amount: float) -> None:
        self._doubles[self._place] += amount


def _number_of(value: Any) -> _Number:
    """What adds to a value of the library."""
    return _MappedNumber(value) if getattr(value, "_multiprocess", False) else value


class BatchHistogram(Histogram):
    """A histogram that takes the observations of a whole step at once."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._total = _number_of(self._sum)
        self._counts = [_number_of(bucket) for bucket in self._buckets]

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """One observation; exemplars are not kept."""
        self._total.inc(amount)
        self._counts[bisect_left(self._upper_bounds, amount)].inc(1)

    def observe_many(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        """Same result as `observe` for each value; costs per bucket touched, not per value."""
        if len(values) < _MANY:
            self._observe_few(values)
            return
        array = np.asarray(values, dtype=np.float64)
        counts = np.bincount(np.searchsorted(self._upper_bounds, array, side="left"))
        self._total.inc(float(array.sum()))
        for bucket in np.flatnonzero(counts).tolist():
            self._counts[bucket].inc(int(counts[bucket]))

    def _observe_few(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        total = 0.0
        counts: dict[int, int] = {}
        for value in values:
            total += value
            bucket = bisect_left(self._upper_bounds, value)
            counts[bucket] = counts.get(bucket, 0) + 1
        if counts:
            self._total.inc(total)
        for bucket, count in counts.items():
            self._counts[bucket].inc(count)


class CounterSeries:
    """One counter series, once per namespace."""

    __slots__ = ("_numbers",)

    def __init__(self, series: Sequence[Counter]) -> None:
        """Raises AttributeError for one without all of its labels."""
        self._numbers = [_number_of(each._value) for each in series]

    def inc(self, amount: float = 1) -> None:
        """`amount` is not negative; nobody looks."""
        for number in self._numbers:
            number.inc(amount)


class GaugeSeries:
    """One gauge series, once per namespace. Writes only when the value changes."""

    __slots__ = ("_last", "_series")

    def __init__(self, series: Sequence[Gauge]) -> None:
        self._series = series
        self._last: float | None = None

    def set(self, value: float) -> None:
        if value != self._last:
            self._last = value
            for series in self._series:
                series.set(value)


class HistogramSeries:
    """One histogram, once per namespace."""

    __slots__ = ("_series",)

    def __init__(self, series: Sequence[BatchHistogram]) -> None:
        self._series = series

    def observe(self, value: float) -> None:
        for series in self._series:
            series.observe(value)

    def observe_many(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        for series in self._series:
            series.observe_many(values)


class SeriesBuilder:
    """Creates series under every namespace's prefix with a fixed set of labels; each exists, at 0, from then on."""

    def __init__(self, prefixes: Iterable[str], labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        self._prefixes = tuple(prefixes)
        self._labels = dict(labels)
        self._registry = registry

    def counter(self, name: str, help_text: str) -> CounterSeries:
        return self.counters(name, help_text, [{}])[0]

    def counters(self, name: str, help_text: str, variants: Sequence[Mapping[str, str]]) -> list[CounterSeries]:
        """One series per variant of the extra labels, all of one metric."""
        names = [*self._labels, *variants[0]]
        metrics = [Counter(prefix + name, help_text, names, registry=self._registry) for prefix in self._prefixes]
        return [CounterSeries([m.labels(**self._labels, **extra) for m in metrics]) for extra in variants]

    def gauge(self, name: str, help_text: str) -> GaugeSeries:
        return self.gauges(name, help_text, [{}])[0]

    def gauges(self, name: str, help_text: str, variants: Sequence[Mapping[str, str]]) -> list[GaugeSeries]:
        names = [*self._labels, *variants[0]]
        metrics = [
            Gauge(prefix + name, help_text, names, registry=self._registry, multiprocess_mode="mostrecent")
            for prefix in self._prefixes
        ]
        series = [GaugeSeries([m.labels(**self._labels, **extra) for m in metrics]) for extra in variants]
        for one in series:
            one.set(0)
        return series

    def histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> HistogramSeries:
        return self.histograms(name, help_text, buckets, [{}])[0]

    def histograms(
        self, name: str, help_text: str, buckets: Sequence[float], variants: Sequence[Mapping[str, str]]
    ) -> list[HistogramSeries]:
        names = [*self._labels, *variants[0]]
        metrics = [
            BatchHistogram(prefix + name, help_text, names, registry=self._registry, buckets=buckets)
            for prefix in self._prefixes
        ]
        return [HistogramSeries([m.labels(**self._labels, **extra) for m in metrics]) for extra in variants]
