"""A chart as a JSON document, for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardqueue.timeline.chart import Chart

FORMAT = "shardqueue-timeline/1"


def document(chart: Chart) -> dict[str, Any]:
    """All of it, as the values of `chart` are called; times in seconds from `origin`, which is wall-clock seconds."""
    return {"format": FORMAT, **_plain(asdict(chart))}


def _plain(value: Any) -> Any:
    """Without the mark that keeps `pass` from being a name of Python's."""
    if isinstance(value, dict):
        return {key.rstrip("_"): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
