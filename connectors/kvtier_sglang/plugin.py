"""The `sglang.srt.plugins` entry point: makes kvtier's names known to SGLang, imports nothing heavy by itself.

Called in every SGLang process. Each part is guarded on its own: what a version does not offer is left out, and choosing
it then fails with SGLang's own message.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

POLICY = "kvtier"
PUBLISHER = "kvtier"


def install() -> None:
    """Register the radix eviction policy and the KV event publisher."""
    for register in (_register_eviction_policy, _register_event_publisher):
        try:
            register()
        except (ImportError, AttributeError) as error:
            logger.info("kvtier: this SGLang does not offer what %s needs (%s)", register.__name__.strip("_"), error)


def _register_eviction_policy() -> None:
    from sglang.srt.arg_groups.choices import add_radix_eviction_policy_choices
    from sglang.srt.mem_cache import utils

    def build(**options: object) -> object:
        from kvtier_sglang.radix import KVTierEvictionStrategy

        return KVTierEvictionStrategy(**options)  # type: ignore[arg-type]

    # A private name, and the only way in: there is no public registry of eviction strategies.
    utils._EVICTION_POLICY_FACTORIES.setdefault(POLICY, build)
    add_radix_eviction_policy_choices([POLICY])


def _register_event_publisher() -> None:
    from sglang.srt.disaggregation.kv_events import EventPublisherFactory

    def build(**options: object) -> object:
        from kvtier_sglang.events import KVTierEventPublisher

        return KVTierEventPublisher(**options)  # type: ignore[arg-type]

    if PUBLISHER not in EventPublisherFactory._registry:
        EventPublisherFactory.register_publisher(PUBLISHER, build)
