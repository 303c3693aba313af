"""What kvtier knows about a request, as engines report it: typed, engine-neutral, immutable."""

from __future__ import annotations

from enum import Enum, IntEnum

import msgspec


class StopReason(IntEnum):
    """Why a response ended. The strongest single predictor of when a session is back (docs/forecast.md)."""

    UNKNOWN = 0
    END_TURN = 1
    TOOL_USE = 2
    LENGTH = 3
    STOP_SEQUENCE = 4
    ABORTED = 5


class InputType(IntEnum):
    """What the newest part of the prompt is."""

    UNKNOWN = 0
    USER_TEXT = 1
    TOOL_RESULT = 2


class BlockType(IntEnum):
    """What a span of the prompt is made of; the main paper's four types, plus unknown."""

    UNKNOWN = 0
    SYSTEM_PROMPT = 1
    TOOL_CONTEXT = 2
    USER_CONTEXT = 3
    INTERMEDIATE_REASONING = 4


class Transition(IntEnum):
    """How this request follows the session's previous one; the main paper's four types, plus unknown."""

    UNKNOWN = 0
    SAME_TOOL_REPEAT = 1
    TOOL_SWITCH = 2
    REASONING_STEP = 3
    AGENT_HANDOFF = 4


class MissReason(Enum):
    """Why a block was recomputed. Every missed block has exactly one; they are never folded together."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    NOT_ADMITTED = "not_admitted"
    PARTIAL_TAIL = "partial_tail"
    IN_FLIGHT = "in_flight"
    LOAD_FAILED = "load_failed"
    CORRUPT = "corrupt"
    VANISHED = "vanished"
    DEADLINE = "deadline"
    NO_ROOM = "no_room"
    NOT_TAKEN = "not_taken"  # offered to the engine, which did not come for it
    DECLINED_RECOMPUTE_CHEAPER = "declined_recompute_cheaper"
    DECLINED_CONSERVATIVE = "declined_conservative"
    TIER_DOWN = "tier_down"
    RESET = "reset"
    CANARY = "canary"  # computed on purpose, to be compared with what is cached


class RoleSpan(msgspec.Struct, frozen=True):
    """Prompt blocks [start, stop) are of one type."""

    start_block: int
    stop_block: int
    type: BlockType


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it arrives. Times are in the cache's clock; lengths in tokens.

    `lossy` says that blocks which went through a lossy codec will do. Its keys must be its own: what is computed from
    such blocks, and what the engine keeps of them, is not what an exact request would compute.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int = 0
    session_id: str = ""
    tenant: str = ""
    adapter: str = ""
    priority: int = 0
    input_type: InputType = InputType.UNKNOWN
    tool: str = ""
    transition: Transition = Transition.UNKNOWN
    role_spans: tuple[RoleSpan, ...] = ()
    lossy: bool = False
    params: dict[str, object] = msgspec.field(default_factory=dict)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became known when the request ended."""

    finished_s: float
    stop_reason: StopReason = StopReason.UNKNOWN
    output_tokens: int = 0
    next_tool: str = ""
