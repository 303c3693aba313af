"""What a run is judged by: times to the first token, where blocks came from."""

from __future__ import annotations

from kvtier.sim.node.flight import Flight


class Score:
    """Collects flights, the first `warm_up` by arrival not among them."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self.ttft_s: list[float] = []
        self.blocks = {"hbm": 0, "dram": 0, "nvme": 0, "miss": 0}
        self.declined_blocks = 0
        self.tokens = 0
        self.latest_s = 0.0

    def first_token(self, flight: Flight, now: float) -> None:
        """A request has its first token."""
        self.latest_s = max(self.latest_s, now)
        self.tokens += flight.prompt_tokens + flight.request.outcome.output_tokens
        if flight.index < self._warm_up:
            return
        self.ttft_s.append(now - flight.arrived_s)
        blocks = self.blocks
        blocks["hbm"] += flight.from_hbm
        blocks["dram"] += flight.from_dram
        blocks["nvme"] += flight.from_nvme
        blocks["miss"] += flight.blocks - flight.cut
        self.declined_blocks += flight.declined
