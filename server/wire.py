"""What clients send, as pydantic models. They are turned into `GenerationRequest`s and go no further.

A field that is not here is ignored, as OpenAI's clients expect of fields they invent; a field of OpenAI's that we know
and cannot honour yet is listed in `NOT_YET` and refused unless it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from ftserve.engine.errors import InvalidRequestError
from ftserve.server.structured import ResponseFormat, StructuredOutputs
from ftserve.server.tools import ToolChoice, Tools

MAX_CHOICES = 128
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_TEMPLATE_CHARS = 2**18
MAX_TOKEN_ID = 2**32 - 1
MAX_COUNT = 2**31 - 1  # of tokens: far beyond every model, and a number that each library can hold

NOT_YET: dict[str, tuple[Any, ...]] = {  # field: values that ask for nothing
    "functions": (None, []),
    "audio": (None,),
}


class Message(TypedDict, total=False):
    """A chat message; stays a dict because templates want dicts."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: str
    content: str | list[dict[str, Any]] | None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool | None = False


TokenIdKey = Annotated[str, StringConstraints(pattern="^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # smaller is sooner
StopString = Annotated[str, StringConstraints(min_length=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_COUNT)]  # `--max-logprobs` bounds it
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(min_length=1)]


class GenerationFields(BaseModel):
    """What chat and completions share."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]] | None = None
    include_stop_str_in_output: bool | None = False
    logit_bias: Annotated[dict[TokenIdKey, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    ignore_eos: bool | None = False
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = True
    add_special_tokens: bool | None = None  # None: to a plain prompt, and not to a chat, whose template writes them
    priority: Priority | None = 0
    return_token_ids: bool | None = False
    timings: bool | None = False
    suffix: str | None = None  # refused, and `best_of` beyond `n`
    best_of: Annotated[int, Field(ge=1)] | None = None
    cache_salt: CacheSalt | None = None

    functions: Any = None
    audio: Any = None

    @model_validator(mode="after")
    def _check_together(self) -> GenerationFields:
        for name in self.model_fields_set & NOT_YET.keys():
            if getattr(self, name) not in NOT_YET[name]:
                raise InvalidRequestError(
                    f"'{name}' is not supported by this server yet.", param=name, code="unsupported_parameter"
                )
        if self.suffix:
            raise InvalidRequestError(
                "'suffix' is not supported: this server only continues prompts.",
                param="suffix",
                code="unsupported_parameter",
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                "'best_of' is not supported beyond 'n': ask for 'n' choices and keep the best.",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("'stream_options' is only allowed with 'stream'.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("'prompt_logprobs' is not allowed with 'stream'.", param="prompt_logprobs")
        return self

    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def salt(self) -> bytes:
        """Return what separates this tenant's cached prompts and media from others'."""
        return (self.cache_salt or "").encode()

    def num_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens to show beside each generated one; None: not even its own."""
        return None

    def num_prompt_logprobs(self, choice: int) -> int | None:
        """Return the same for the tokens of the prompt; each choice that wants it has the prompt computed anew."""
        return self.prompt_logprobs if choice == 0 else None

    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TemplateFields(BaseModel):
    """What says how messages become a prompt."""

    model_config = ConfigDict(extra="ignore", strict=True)

    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    documents: list[dict[str, Any]] | None = None

    def template_kwargs(self) -> dict[str, Any] | None:
        """Return what the template is given besides the messages."""
        return self.chat_template_kwargs

    @model_validator(mode="after")
    def _check_prompt_end(self) -> TemplateFields:
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise InvalidRequestError(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                param="continue_final_message",
            )
        return self


class ChatRequest(TemplateFields, GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    enable_thinking: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs'.", param="top_logprobs")
        return self

    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def template_kwargs(self) -> dict[str, Any] | None:
        """Return how much to think, and the request's own values."""
        kwargs: dict[str, Any] = {}
        thinks = self.enable_thinking
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
            if thinks is None and self.reasoning_effort == "none":
                thinks = False
        if thinks is not None:
            kwargs["enable_thinking"] = kwargs["thinking"] = thinks
        if not kwargs:
            return self.chat_template_kwargs
        return kwargs | (self.chat_template_kwargs or {})


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`."""

    echo: bool | None = False
    prompt: str | TokenIds | list[str] | list[TokenIds]
    logprobs: NumLogprobs | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self, choice: int) -> int | None:
        if self.logprobs is None or not self.echo:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)  # what is echoed has them as well


class TokenizeRequest(TemplateFields):
    """Body of `POST /tokenize`: `prompt`, or `messages`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # None: with `prompt`, and not with `messages`, whose template has them
    return_token_strs: bool | None = False


class EmbeddingRequest(BaseModel):
    """Body of `POST /v1/embeddings`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    input: str | TokenIds | list[str] | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    add_special_tokens: bool | None = True
    priority: Priority | None = 0


class DetokenizeRequest(BaseModel):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]]


W = TypeVar("W", bound=BaseModel)


def parse(model: type[W], body: bytes) -> W:
    """Parse JSON bytes.

    Raises:
        InvalidRequestError: naming the first field that is wrong.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False, include_input=False)
        raise _invalid(_aptest(errors)) from None


def validate(model: type[W], fields: Mapping[str, Any]) -> W:
    """Make a request of fields that another one has.

    Raises:
        InvalidRequestError: naming the first field that is wrong.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False, include_input=False)
        raise _invalid(_aptest(errors)) from None


def text_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with their content as plain text, parts joined by newlines.

    Raises:
        InvalidRequestError: a message without a role, or a part that is not text.
    """
    return [_plain(message, index) for index, message in enumerate(messages)]


def _plain(message: Message, index: int) -> dict[str, Any]:
    if "role" not in message:
        raise InvalidRequestError("A message has no 'role'.", param=f"messages.{index}.role")
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    where = f"messages.{index}.content"
    return {**message, "content": "\n".join(_part_text(part, f"{where}.{k}") for k, part in enumerate(content))}


def _part_text(part: dict[str, Any], where: str) -> str:
    if part.get("type") != "text":
        raise InvalidRequestError(
            f"This model takes text only; a content part has type {str(part.get('type'))[:40]!r}.", param=where
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError("A text part needs a string 'text'.", param=f"{where}.text")
    return text


def _aptest(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return what to say of the first field that is wrong; a union reports each of its members.

    That is the member whose type fits and whose value does not, or else the one that got furthest.
    """
    field = errors[0]["loc"][:1]
    return max(
        (error for error in errors if error["loc"][:1] == field),
        key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])),
    )


def _invalid(error: ErrorDetails) -> InvalidRequestError:
    if error["type"] == "json_invalid":
        return InvalidRequestError("The body is not valid JSON.", code="invalid_json")
    # A union reports each of its members behind the field; the field's own path is what a client knows.
    path = [str(part) for part in error["loc"] if not _names_a_type(part)]
    if not path:
        return InvalidRequestError("The body must be a JSON object.", code="invalid_json")
    param = ".".join(path)
    message = error["msg"].replace(" after validation", "")
    return InvalidRequestError(f"'{param}': {message}.", param=param)


def _names_a_type(part: str | int) -> bool:
    return isinstance(part, str) and (
        "[" in part or part in {"str", "constrained-str", "int", "float", "StructuralTags"}
    )
