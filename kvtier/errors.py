"""Every exception kvtier raises, drawn once.

KVTierError
├── ConfigError            a configuration value is wrong; the message says what to change
│   └── ModelConfigError   a model's config.json cannot be interpreted; names the fields
├── TraceError             a request trace cannot be read; names the file and line
├── EngineMismatchError    the engine's version or its KV layout is not one we support
├── HintError              a client's hint cannot be understood; the message says what to change
├── TierError              a tier could not do what was asked; becomes a counted miss, never reaches the engine
│   ├── TierFullError      no room within the cap
│   ├── TierIOError        the medium failed (errno kept)
│   ├── TierClosedError    the tier has been closed or detached
│   ├── ForeignBlockError  encoded bytes of another model, codec or bits map
│   └── NotEncodableError  a codec cannot write these bytes down (not finite, or no room)
├── CorruptBlockError      bytes do not match their header or checksum
├── IntegrityError         an internal invariant is broken (raised by check_integrity and by double release)
└── LeaseError             a lease was released twice or used after release
"""

from __future__ import annotations


class KVTierError(Exception):
    """Root of every exception raised on purpose by kvtier."""


class ConfigError(KVTierError):
    """A configuration value is wrong. The message is one line and says what to change."""


class ModelConfigError(ConfigError):
    """A model config cannot be interpreted. The message names the fields."""


class TraceError(KVTierError):
    """A request trace cannot be read. The message names the file and the line."""


class HintError(KVTierError):
    """A client's hint cannot be understood. The message is one line and says what to change; nothing has changed."""


class EngineMismatchError(KVTierError):
    """The engine's version or its KV layout is not supported."""


class TierError(KVTierError):
    """A tier could not do what was asked. `reason` is the label counted in metrics."""

    reason = "tier_error"


class TierFullError(TierError):
    """No room within the tier's cap."""

    reason = "full"


class TierIOError(TierError):
    """The medium failed."""

    reason = "io_error"


class TierClosedError(TierError):
    """The tier has been closed or detached."""

    reason = "closed"


class ForeignBlockError(TierError):
    """Encoded bytes belong to another model, codec, bits map or row form; never decoded, always a miss."""

    reason = "foreign"


class NotEncodableError(TierError):
    """A codec cannot write these bytes down: they are not finite, or do not fit the room given."""

    reason = "not_encodable"


class CorruptBlockError(TierError):
    """The bytes read do not match their header or checksum."""

    reason = "corrupt"


class IntegrityError(KVTierError):
    """An internal invariant does not hold."""


class LeaseError(IntegrityError):
    """A lease was released twice, or used after it was released."""
