"""What the doctor reports."""

from __future__ import annotations

from enum import Enum

import msgspec


class State(Enum):
    """OK, a capability this machine does not have (nothing is wrong), or a fault that needs the fix named."""

    OK = "ok"
    ABSENT = "absent"
    FAULT = "fault"


class Finding(msgspec.Struct, frozen=True):
    """One check of one subject: a tier, or "machine". A fault says its fix."""

    subject: str
    check: str
    state: State
    says: str
    fix: str = ""


class CurvePoint(msgspec.Struct, frozen=True):
    """What moving `n_bytes` in one call costs, the median of a few."""

    n_bytes: int
    read_s: float
    write_s: float


class Report(msgspec.Struct, frozen=True):
    """Everything found, and the measured curve of each tier that could be measured."""

    findings: list[Finding]
    curves: dict[str, list[CurvePoint]]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.state is not State.FAULT for finding in self.findings)
