"""A listener to SGLang's own KV events, inside the scheduler: what device and host memory hold, on kvtier's metrics.

`--kv-events-config '{"publisher":"kvtier", ...}'` takes every option of the publisher "zmq" and publishes just the
same, so that routers keep hearing of it; besides, the pages held above the storage level are counted by medium.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sglang.srt.disaggregation.kv_events import EventPublisher, ZmqEventPublisher

from kvtier_sglang.above import PagesAbove, listeners


class KVTierEventPublisher(EventPublisher):
    """What SGLang builds for the publisher name "kvtier": the zmq publisher, listened to."""

    def __init__(self, attn_dp_rank: int = 0, **options: Any) -> None:
        self._pages = PagesAbove()
        self._zmq = ZmqEventPublisher(attn_dp_rank=attn_dp_rank, **options)
        listeners.append(self._pages)

    def publish(self, events: Any) -> None:
        for event in events.events:
            self._pages.take(event)
        self._zmq.publish(events)

    def shutdown(self) -> None:
        with contextlib.suppress(ValueError):
            listeners.remove(self._pages)
        self._zmq.shutdown()

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:
        """As the zmq publisher says."""
        described: dict[str, Any] | None = self._zmq.describe_local_source(block_size)
        return described
