"""vLLM's requests in kvtier's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request, RequestStatus

from kvtier.model.request import InputType, Outcome, RequestContext, StopReason

_STOPS = {
    RequestStatus.FINISHED_STOPPED: StopReason.END_TURN,
    RequestStatus.FINISHED_LENGTH_CAPPED: StopReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: StopReason.ABORTED,
}


def context_of(request: Request, now: float) -> RequestContext:
    """What is known of a request when it arrives."""
    params = (request.kv_transfer_params or {}).get("kvtier") or {}
    if not isinstance(params, dict):
        params = {}
    return RequestContext(
        request_id=request.request_id,
        arrival_s=now,
        prompt_tokens=request.num_prompt_tokens,
        session_id=str(getattr(request, "session_id", None) or params.get("session", "")),
        tenant=str(request.cache_salt or ""),
        adapter=request.lora_request.lora_name if request.lora_request else "",
        priority=request.priority,
        input_type=_input_type(params),
        tool=str(params.get("tool", "")),
        params=params,
    )


def outcome_of(request: Request, now: float, tool_call_markers: frozenset[int] = frozenset()) -> Outcome:
    """What became known when it ended. vLLM's core does not know of tool calls: they are found by the model's own
    marker tokens in the output, or by a structured output that was asked for."""
    stop = _STOPS.get(request.status, StopReason.UNKNOWN)
    if stop is StopReason.ABORTED and request.sampling_params is not None and request.sampling_params.stop:
        # A stop string is found by the front end, which then aborts: the core cannot tell it from a client's abort.
        stop = StopReason.STOP_SEQUENCE
    if stop is StopReason.END_TURN and _calls_tool(request.output_token_ids, tool_call_markers):
        stop = StopReason.TOOL_USE
    return Outcome(finished_s=now, stop_reason=stop, output_tokens=request.num_output_tokens)


def _calls_tool(output: Sequence[int], markers: frozenset[int]) -> bool:
    return bool(markers) and not markers.isdisjoint(output)


def _input_type(params: dict[str, Any]) -> InputType:
    return {"user": InputType.USER_TEXT, "tool": InputType.TOOL_RESULT}.get(
        str(params.get("input", "")), InputType.UNKNOWN
    )
