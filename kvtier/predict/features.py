"""What the hazard model may know of a subject, as a short row of active one-hot feature ids.

Everything here is known when a request ends and needs no session id. Continuous quantities become log2 buckets; bucket
0 means "not known". A group a subject has nothing to say about is filled with PAD, whose weight is fixed at zero, so
optional knowledge (roles, tools) costs nothing where it is absent.

Lengths are counted in units of 512 tokens whatever the engine's block size, so that one prior serves all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.model.request import BlockType, InputType, StopReason, Transition

ROW_WIDTH = 14
UNIT_TOKENS = 512

_STOPS = len(StopReason)
_INPUTS = len(InputType)
_BLOCK_TYPES = len(BlockType)
_TRANSITIONS = len(Transition)
GAPS, TURNS, INPUTS, OUTPUTS, NEWS, AGES, COUNTS, DEPTHS = 12, 7, 9, 10, 9, 14, 8, 10

# (name, size), in the order of their ids. The first group of each kind of subject is its bias.
_GROUPS = (
    ("visit", 1),
    ("stop_input", _STOPS * _INPUTS),
    ("stop_gap", _STOPS * GAPS),
    ("stop_ewma", _STOPS * GAPS),
    ("stop_turn", _STOPS * TURNS),
    ("input", INPUTS),
    ("output_session", OUTPUTS * 2),
    ("new", NEWS),
    ("session_age", AGES),
    ("shared_turn", 2 * TURNS),
    ("gap_ewma", GAPS * GAPS),
    ("stop_input_output", _STOPS * _INPUTS * OUTPUTS),
    ("role", _BLOCK_TYPES * _TRANSITIONS),
    ("tool", GAPS),
    ("tail", 1),
    ("tail_turn", TURNS),
    ("tail_depth", DEPTHS),
    ("run", 1),
    ("run_gap", GAPS),
    ("run_ewma", GAPS),
    ("run_arrivals", COUNTS),
    ("run_count", COUNTS),
    ("run_depth", DEPTHS),
    ("run_branch_stop", 2 * _STOPS),
    ("run_age", AGES),
    ("run_gap_ewma", GAPS * GAPS),
)
OFFSETS: dict[str, int] = {}
_total = 0
for _name, _size in _GROUPS:
    OFFSETS[_name] = _total
    _total += _size
PAD = _total
FEATURES = _total + 1
BIASES = (OFFSETS["visit"], OFFSETS["tail"], OFFSETS["run"])

(_STOP_INPUT, _STOP_GAP, _STOP_EWMA, _STOP_TURN, _INPUT, _OUTPUT, _NEW, _AGE, _SHARED, _GAP_EWMA, _SIO) = (
    OFFSETS[name] for name, _ in _GROUPS[1:12]
)
_RUN_STOP_AT = 6  # its place in a run's row
_ROLE, _TOOL = OFFSETS["role"], OFFSETS["tool"]


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """Which knowledge the model may use: the ablation switches. A switched-off quantity reads as "not known"."""

    stop: bool = True
    lengths: bool = True
    gaps: bool = True
    turns: bool = True
    tools: bool = True
    roles: bool = False  # no gain beyond stop reason and input type (docs/forecast.md)
    sharing: bool = False  # no gain: shared runs have clocks of their own


@dataclass(slots=True)
class VisitFacts:
    """What is known of a visit when its request ends. Unknown gaps are negative."""

    stop: int = 0
    input_type: int = 0
    turn: int = 1
    gap_s: float = -1.0
    ewma_log_gap: float = math.nan
    session_age_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    new_tokens: int = 0
    shared: bool = False
    block_type: int = 0
    transition: int = 0
    tool_s: float = -1.0


@dataclass(slots=True)
class RunFacts:
    """What is known of a shared run when it is touched."""

    gap_s: float = -1.0
    ewma_log_gap: float = math.nan
    arrivals: int = 0
    count: int = 0
    depth_tokens: int = 0
    branched: bool = False
    stop: int = 0
    age_s: float = 0.0


def bucket(value: float, floor: float, size: int) -> int:
    """1 below `floor`, one more for each doubling, at most `size` - 1; 0 (not known) for a negative or NaN value."""
    if not value >= 0:
        return 0
    if value < floor:
        return 1
    return min(size - 1, 1 + int(value / floor).bit_length())


def _gap(gap_s: float) -> int:
    return bucket(gap_s, 2.0, GAPS)


def _ewma(log_gap: float) -> int:
    return 0 if math.isnan(log_gap) else bucket(2.0**log_gap, 2.0, GAPS)


def visit_row(facts: VisitFacts, use: FeatureSet) -> list[int]:
    """The ids of a finished request."""
    stop = facts.stop if use.stop else 0
    kind = facts.input_type if use.stop else 0
    gap = _gap(facts.gap_s) if use.gaps else 0
    ewma = _ewma(facts.ewma_log_gap) if use.gaps else 0
    turn = bucket(facts.turn, 1.0, TURNS) if use.turns else 0
    age = bucket(facts.session_age_s, 10.0, AGES) if use.turns else 0
    lengths = use.lengths
    n_input = bucket(facts.input_tokens, 1000.0, INPUTS) if lengths else 0
    n_output = bucket(facts.output_tokens, 16.0, OUTPUTS) if lengths and facts.output_tokens else 0
    n_new = bucket(facts.new_tokens / UNIT_TOKENS, 2.0, NEWS) if lengths else 0
    shared = int(facts.shared and use.sharing)
    stop_input = stop * _INPUTS + kind
    role = facts.block_type * _TRANSITIONS + facts.transition if use.roles else 0
    tool = _gap(facts.tool_s) if use.tools else 0
    return [
        0,
        _STOP_INPUT + stop_input,
        _STOP_GAP + stop * GAPS + gap,
        _STOP_EWMA + stop * GAPS + ewma,
        _STOP_TURN + stop * TURNS + turn,
        _INPUT + n_input,
        _OUTPUT + n_output * 2 + (facts.turn > 1),
        _NEW + n_new,
        _AGE + age,
        _SHARED + shared * TURNS + turn,
        _GAP_EWMA + gap * GAPS + ewma,
        _SIO + stop_input * OUTPUTS + n_output,
        _ROLE + role if role else PAD,
        _TOOL + tool if tool else PAD,
    ]


def tail_row(turn: int, depth_tokens: int, use: FeatureSet) -> list[int]:
    """The ids of an abandoned tail: what a session left behind when it went on elsewhere."""
    row = [
        OFFSETS["tail"],
        OFFSETS["tail_turn"] + (bucket(turn, 1.0, TURNS) if use.turns else 0),
        OFFSETS["tail_depth"] + bucket(depth_tokens / UNIT_TOKENS, 1.0, DEPTHS),
    ]
    return row + [PAD] * (ROW_WIDTH - len(row))


def run_row(facts: RunFacts, use: FeatureSet) -> list[int]:
    """The ids of a shared run."""
    stop = facts.stop if use.stop else 0
    gap = _gap(facts.gap_s) if use.gaps else 0
    ewma = _ewma(facts.ewma_log_gap) if use.gaps else 0
    row = [
        OFFSETS["run"],
        OFFSETS["run_gap"] + gap,
        OFFSETS["run_ewma"] + ewma,
        OFFSETS["run_arrivals"] + (bucket(facts.arrivals, 1.0, COUNTS) if use.sharing else 0),
        OFFSETS["run_count"] + (bucket(facts.count, 1.0, COUNTS) if use.sharing else 0),
        OFFSETS["run_depth"] + bucket(facts.depth_tokens / UNIT_TOKENS, 1.0, DEPTHS),
        OFFSETS["run_branch_stop"] + facts.branched * _STOPS + stop,
        OFFSETS["run_age"] + bucket(facts.age_s, 10.0, AGES),
        OFFSETS["run_gap_ewma"] + gap * GAPS + ewma,
    ]
    return row + [PAD] * (ROW_WIDTH - len(row))


def with_stop(row: npt.NDArray[np.int16], branched: bool, stop: int, use: FeatureSet) -> None:
    """Write into a run's row, in place, how the request that touched it ended."""
    row[_RUN_STOP_AT] = OFFSETS["run_branch_stop"] + branched * _STOPS + (stop if use.stop else 0)


def blank_row() -> npt.NDArray[np.int16]:
    """A row that says nothing."""
    return np.full(ROW_WIDTH, PAD, np.int16)
