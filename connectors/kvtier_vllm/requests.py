"""vLLM's requests in kvtier's words."""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus

from kvtier.model.request import InputType, Outcome, RequestContext, StopReason
from kvtier.predict.roles import ChatMarkers, find_roles, stop_reason_of, transition_of

_STOPS = {
    RequestStatus.FINISHED_STOPPED: StopReason.END_TURN,
    RequestStatus.FINISHED_LENGTH_CAPPED: StopReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: StopReason.ABORTED,
}
_INPUTS = {"user": InputType.USER_TEXT, "tool": InputType.TOOL_RESULT}
_TAIL_TOKENS = 4096
_LOSSY_SALT = "\0kvtier:lossy"


def context_of(request: Request, now: float, markers: ChatMarkers, block_tokens: int, roles: bool) -> RequestContext:
    """What is known of a request when it arrives.

    The newest message is looked for in the last tokens of the prompt only; with `roles` the whole prompt is read and
    its spans are named.
    """
    params = (request.kv_transfer_params or {}).get("kvtier") or {}
    if not isinstance(params, dict):
        params = {}
    prompt = request.prompt_token_ids or []
    found = find_roles(prompt if roles else prompt[-_TAIL_TOKENS:], markers, block_tokens)
    tool = str(params.get("tool", ""))
    return RequestContext(
        request_id=request.request_id,
        arrival_s=now,
        prompt_tokens=request.num_prompt_tokens,
        session_id=str(getattr(request, "session_id", None) or params.get("session", "")),
        tenant=str(request.cache_salt or "").removesuffix(_LOSSY_SALT),
        adapter=request.lora_request.lora_name if request.lora_request else "",
        priority=request.priority,
        input_type=_INPUTS.get(str(params.get("input", "")), found.input_type),
        tool=tool,
        transition=transition_of(found, tool, str(params.get("previous_tool", ""))),
        role_spans=found.spans if roles else (),
        lossy=str(request.cache_salt or "").endswith(_LOSSY_SALT),
        params=params,
    )


def accepts_lossy(request: Request, unless_refused: bool) -> bool:
    """Whether blocks that went through a lossy codec may serve this request: `"lossy": true` in
    kv_transfer_params.kvtier asks for it, false refuses; what a request says nothing of, the operator decides."""
    params = (request.kv_transfer_params or {}).get("kvtier")
    return bool(params.get("lossy", unless_refused)) if isinstance(params, dict) else unless_refused


def set_apart(request: Request) -> None:
    """Give the request block hashes that no exact request has.

    What is loaded from a lossy tier lands in the engine's own prefix cache, and all that is computed after it differs
    too. Both must stay among requests that accept it, on the device as in every tier. Call it before anybody has seen
    the request's hashes.
    """
    request.cache_salt = (request.cache_salt or "") + _LOSSY_SALT
    request.block_hashes.clear()
    request.update_block_hashes()


def outcome_of(request: Request, now: float, markers: ChatMarkers) -> Outcome:
    """What became known when it ended. vLLM's core does not know of tool calls: they are found by the model's own
    marker tokens in the output."""
    stop = _STOPS.get(request.status, StopReason.UNKNOWN)
    if stop is StopReason.ABORTED and request.sampling_params is not None and request.sampling_params.stop:
        # A stop string is found by the front end, which then aborts: the core cannot tell it from a client's abort.
        stop = StopReason.STOP_SEQUENCE
    if stop is not StopReason.ABORTED:
        stop = stop_reason_of(request.output_token_ids, markers, stop)
    return Outcome(finished_s=now, stop_reason=stop, output_tokens=request.num_output_tokens)
