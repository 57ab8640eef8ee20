"""OpenAI requests read and checked: what is asked, in our terms, or an error the client's library understands.

Unknown and null fields are ignored, as OpenAI's clients expect; a known field that this server cannot honour is refused.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from burnish.policy.encoding.config import NAMED_EFFORTS, EncodingConfig
from burnish.policy.encoding.messages import Message, Role, dump_json, function_schemas, messages_from_openai

MAX_CHOICES = 128
MAX_STOPS = 16
COMPLETION_TOKENS = 16
"""OpenAI's default max_tokens of a plain completion."""
# fields of OpenAI's and vLLM's clients that would change what is sampled, and the values that change nothing
NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": {},
    "best_of": 1,
}
# DeepSeek's API names on the checkpoint's; `none` turns thinking off
API_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}


class ApiError(Exception):
    """An answer that is an error: HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kinds = {503: "service_unavailable_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class CommonRequest:
    """What both kinds of request share."""

    model: str | None
    stream: bool
    include_usage: bool
    max_tokens: int | None
    """None: as many as the context has room for."""
    temperature: float
    top_p: float
    top_k: int
    num_choices: int
    seed: int
    stops: tuple[str, ...]
    logprobs: bool
    return_token_ids: bool


@dataclass(frozen=True, kw_only=True)
class ChatRequest(CommonRequest):
    """POST /v1/chat/completions."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    encoding: EncodingConfig

    @property
    def setting(self) -> str:
        """What beside the messages decides the ids."""
        config = self.encoding
        return dump_json([config.thinking, config.effort, str(config.history), list(self.tools)])


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    prompts: tuple[str | tuple[int, ...], ...]


class _Fields:
    """Typed access to a JSON object; null is absence."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def get(self, name: str) -> Any:
        return self._raw.get(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ApiError(400, f"{name} must be true or false, got {value!r}", param=name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ApiError(400, f"{name} must be a number from {low:g} to {high:g}, got {value!r}", param=name)
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ApiError(400, f"{name} must be an integer from {low} to {high}, got {value!r}", param=name)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ApiError(400, f"{name} must be an object, got {type(value).__name__}", param=name)
        return value

    def refuse(self, name: str, allowed: Sequence[Any], why: str) -> None:
        value = self._raw.get(name)
        if value is not None and value not in allowed:
            raise ApiError(400, f"{name}={value!r} is not supported: {why}", param=name)


def _common(fields: _Fields, default_max_tokens: int | None) -> dict[str, Any]:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError(400, f"model must be a string, got {type(model).__name__}", param="model")
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    is_list = isinstance(stops, Sequence) and all(isinstance(text, str) and text for text in stops)
    if not is_list or len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop must be a string or up to {MAX_STOPS} non-empty strings", param="stop")
    limits = [fields.integer(name, 1, 1 << 40) for name in ("max_completion_tokens", "max_tokens")]
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1)
    for name, neutral in NEUTRAL.items():
        fields.refuse(name, (neutral,), "the sampler has temperature, top_p and top_k")
    return {
        "model": model,
        "stream": fields.boolean("stream"),
        "include_usage": bool(fields.mapping("stream_options").get("include_usage")),
        "max_tokens": next((limit for limit in limits if limit is not None), default_max_tokens),
        "temperature": fields.number("temperature", 1.0, 0.0, 2.0),
        "top_p": _positive(fields.number("top_p", 1.0, 0.0, 1.0)),
        # -1 is how vLLM's clients say off
        "top_k": max(0, fields.integer("top_k", -1, 1 << 31) or 0),
        "num_choices": fields.integer("n", 1, MAX_CHOICES) or 1,
        "seed": secrets.randbits(62) if seed is None else seed & ((1 << 62) - 1),
        "stops": tuple(stops),
        "return_token_ids": fields.boolean("return_token_ids"),
    }


def _positive(top_p: float) -> float:
    if top_p == 0:
        raise ApiError(400, "top_p must be above 0 (use temperature 0 for greedy)", param="top_p")
    return top_p


def parse_completion(raw: Mapping[str, Any]) -> CompletionRequest:
    """Read a plain completion request.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = _Fields(raw)
    fields.refuse("echo", (False,), "prompt tokens are not scored here")
    fields.refuse("suffix", ("",), "the policy has no infilling")
    prompt = raw.get("prompt")
    prompts: list[Any]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(_is_id(item) for item in prompt)):
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = prompt
    else:
        raise ApiError(400, "prompt must be a text, a list of token ids, or a list of either", param="prompt")
    read: list[str | tuple[int, ...]] = []
    for index, item in enumerate(prompts):
        if isinstance(item, str):
            read.append(item)
        elif isinstance(item, list) and item and all(_is_id(token_id) for token_id in item):
            read.append(tuple(item))
        else:
            raise ApiError(400, f"prompt[{index}] must be a text or a non-empty list of token ids", param="prompt")
    common = _common(fields, COMPLETION_TOKENS)
    if len(read) * common["num_choices"] > MAX_CHOICES:
        raise ApiError(400, f"prompts times n must be at most {MAX_CHOICES}", param="prompt")
    # the legacy field is a count of alternatives; the sampled token's own comes with any
    logprobs = fields.integer("logprobs", 0, 1) if not isinstance(raw.get("logprobs"), bool) else raw["logprobs"]
    return CompletionRequest(**common, prompts=tuple(read), logprobs=logprobs is not None and logprobs is not False)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_chat(raw: Mapping[str, Any], encoding: EncodingConfig) -> ChatRequest:
    """Read a chat request.

    Args:
        raw: the JSON body.
        encoding: the server's defaults for thinking, effort and history.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = _Fields(raw)
    fields.refuse("top_logprobs", (0,), "only the sampled token's own log-probability is kept")
    fields.refuse("tool_choice", ("auto", "none"), "decoding is not constrained, so a call cannot be forced")
    tools: tuple[dict[str, Any], ...] = ()
    try:
        messages = messages_from_openai(raw.get("messages"))
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    try:
        if raw.get("tool_choice") != "none":
            tools = tuple(function_schemas(raw.get("tools"), "tools"))
    except ValueError as error:
        raise ApiError(400, str(error), param="tools") from error
    messages = _with_format(_leading_developer(messages), fields.mapping("response_format"))
    return ChatRequest(
        **_common(fields, None),
        messages=tuple(messages),
        tools=tools,
        encoding=_encoding(fields, encoding),
        logprobs=fields.boolean("logprobs"),
    )


def _leading_developer(messages: list[Message]) -> list[Message]:
    """OpenAI's developer role at the start means what system means here; the format's own would be dropped later."""
    if messages and messages[0].role is Role.developer:
        messages[0] = replace(messages[0], role=Role.system)
    return messages


def _with_format(messages: list[Message], response_format: Mapping[str, Any]) -> list[Message]:
    kind = response_format.get("type", "text")
    if kind == "text":
        return messages
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
        schema = response_format["json_schema"].get("schema")
    else:
        schema = None
    if not isinstance(schema, dict):
        raise ApiError(
            400, "response_format must be text, json_object or json_schema with a schema", param="response_format"
        )
    if not messages or messages[0].role is not Role.system:
        messages = [Message(role=Role.system), *messages]
    return [replace(messages[0], response_format=schema), *messages[1:]]


def _encoding(fields: _Fields, default: EncodingConfig) -> EncodingConfig:
    extra = fields.mapping("chat_template_kwargs")
    effort = fields.get("reasoning_effort")
    effort = extra.get("reasoning_effort") if effort is None else effort
    thinking = default.thinking if effort is None else effort != "none"
    for name in ("thinking", "enable_thinking"):
        if isinstance(extra.get(name), bool):
            thinking = extra[name]
    kind = fields.mapping("thinking").get("type")
    if kind is not None:
        if kind not in ("enabled", "disabled"):
            raise ApiError(400, f"thinking.type must be enabled or disabled, got {kind!r}", param="thinking")
        thinking = kind == "enabled"
    if effort is None or effort == "none":
        return replace(default, thinking=thinking)
    named = API_EFFORTS.get(effort, effort) if isinstance(effort, str) else effort
    is_number = isinstance(named, int) and not isinstance(named, bool)
    try:
        return replace(default, thinking=thinking, effort=str(named) if is_number or isinstance(named, str) else "")
    except ValueError as error:
        names = ", ".join([*API_EFFORTS, "none"])
        low, high = min(NAMED_EFFORTS.values()), max(NAMED_EFFORTS.values())
        raise ApiError(
            400,
            f"reasoning_effort must be one of {names} (from {low} to {high}) or an integer 1-100, got {effort!r}",
            param="reasoning_effort",
        ) from error
