"""From a request's body to sequences in the engine: what one preprocess thread does with one exchange."""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ftserve.engine.client import Engine
from ftserve.engine.errors import (
    DeadlineExceededError,
    FtserveError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestCancelledError,
    RequestTooLongError,
)
from ftserve.engine.grammar import Grammar, GrammarMaker, UnknownGrammarError
from ftserve.engine.types import GenerationRequest, MediaSpan
from ftserve.preprocess.chat import ChatTemplate
from ftserve.preprocess.tokens import make_encoder
from ftserve.preprocess.vocabulary import TokenKind
from ftserve.server.exchange import Exchange
from ftserve.server.extras import Extras
from ftserve.server.logprobs import Scores
from ftserve.server.media import MediaFront
from ftserve.server.metrics import Recorder
from ftserve.server.model import ServedModel
from ftserve.server.problems import problem_of
from ftserve.server.reply import Reply, ReplyFormat
from ftserve.server.rich import RichOptions
from ftserve.server.sampling import Constraints, constraints_of, sampling_params
from ftserve.server.wire import ChatRequest, GenerationFields, TemplateFields, parse, text_of

log = logging.getLogger("ftserve.server")

_NORMALIZER_ALLOWANCE = 4  # how many characters a normalizer may fold into one
MAX_TOTAL_CHOICES = 1024  # prompts times n


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an endpoint makes of a body."""

    fields: GenerationFields
    prompts: Sequence[array[int]]  # token ids; each gets `n` choices
    max_tokens: int | None  # None: as many as the model holds
    reply_format: ReplyFormat
    echoes: Sequence[str] = ()  # for each prompt, the text that its answers begin with
    media: tuple[MediaSpan, ...] = ()  # of the only prompt
    rich: RichOptions | None = None  # what the answers carry besides text
    make_grammar: Callable[[GrammarMaker], Grammar | None] | None = None  # what tools ask for; the fields may, too
    thought_end: str = ""  # a grammar holds for what follows it


Handle = Callable[["GenerationWorker", Exchange], Prepared | None]  # None: it has answered itself


class Job(NamedTuple):
    """One exchange on its way to a preprocess thread."""

    exchange: Exchange
    handle: Handle


class GenerationWorker:
    """The state of one preprocess thread; called with each of its jobs."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        recorder: Recorder,
        *,
        num_lanes: int,
        first_lane: int,
        request_timeout_s: float,
        max_response_bytes: int,
        max_logprobs: int,
        media: MediaFront | None,
        resume: Callable[[Job], None],
    ) -> None:
        self.model = model
        self._encode = make_encoder(model.tokenizer_json, use_fastokens=model.use_fastokens)
        source = model.checkpoint.chat_template
        self._template = ChatTemplate(source, model.checkpoint.special_tokens) if source else None
        self.engine = engine
        self.recorder = recorder
        self.media = media
        self.resume = resume  # queue a job that was left to wait for its images
        self._num_lanes = num_lanes
        self._lane = first_lane % num_lanes
        self._timeout_s = request_timeout_s
        self._max_response_bytes = max_response_bytes
        self._max_logprobs = max_logprobs

    def __call__(self, job: Job) -> None:
        """Prepare and submit, or answer with an error. Never raises."""
        exchange = job.exchange
        exchange.times.preprocess_start = exchange.times.preprocess_start or time.monotonic()  # it may be here again
        try:
            self._check_in_time(exchange)
            prepared = job.handle(self, exchange)
            if prepared is not None:
                self._go_on(exchange, prepared)
        except Exception as exc:  # noqa: BLE001 - `problem_of` logs what is not ours
            problem = problem_of(exc, exchange.request_id)
            self.recorder.count(str(problem.status))
            exchange.refuse(problem)

    def _go_on(self, exchange: Exchange, prepared: Prepared) -> None:
        """Submit, or leave the request to wait for its grammar, so that this thread waits for none."""
        try:
            constraints = constraints_of(
                self.model,
                prepared.fields,
                self._encode,
                make_grammar=prepared.make_grammar,
                thought_end=prepared.thought_end,
            )
        except UnknownGrammarError as unknown:

            def done(error: FtserveError | None) -> None:
                def again(_worker: GenerationWorker, _exchange: Exchange) -> Prepared:
                    if error is not None:
                        raise error
                    return prepared

                self.resume(Job(exchange, again))

            self.model.grammars.compile_soon(unknown, lambda: not exchange.is_cancelled, done)
        else:
            self._submit(exchange, prepared, constraints)

    def warm_up(self) -> None:
        """Do once what the first request would otherwise wait for."""
        message = '[{"role": "user", "content": "Hello 1 é"}]'
        fields = parse(ChatRequest, f'{{"model": "", "messages": {message}}}'.encode())
        text = "Hello"
        if self._template is not None:
            with contextlib.suppress(InvalidRequestError):  # a template may want more than one user's message
                text = self.render(text_of(fields.messages), fields)
        self.tokenize(text, add_special_tokens=False)

    def check_model(self, name: str) -> None:
        """Raise ModelNotFoundError if `name` is not what we serve."""
        if name != self.model.name:
            raise ModelNotFoundError(f"The model '{name[:200]}' does not exist here; this server has a single one.")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        fields: TemplateFields,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt text that the chat template, the model's or the request's, makes of `messages`.

        Raises:
            InvalidRequestError: the template refuses them, or there is none, or it may not come with a request.
        """
        continue_final = bool(fields.continue_final_message)
        options: dict[str, Any] = {
            "add_generation_prompt": fields.add_generation_prompt is not False and not continue_final,
            "kwargs": fields.template_kwargs(),
            "tools": tools,
            "documents": fields.documents,
            "continue_final": continue_final,
        }
        if fields.chat_template is not None:
            if self.model.templates is None:
                raise InvalidRequestError(
                    "This server takes no templates from requests; its operator can allow them.", param="chat_template"
                )
            return self.model.templates.render(fields.chat_template, messages, **options)
        if self._template is None:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.")
        return self._template.render(messages, **options)

    def tokenize(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Return the ids of `text`.

        Raises:
            RequestTooLongError: at once, if not even the longest tokens could make it fit.
        """
        vocabulary = self.model.vocabulary
        if vocabulary.kind is not TokenKind.OPAQUE:  # else a token may stand for any number of characters
            most = _NORMALIZER_ALLOWANCE * vocabulary.max_token_chars * self.model.max_model_len
            if len(text) > most:
                raise RequestTooLongError(
                    f"The prompt has {len(text)} characters; the model holds {self.model.max_model_len} tokens."
                )
        return self._encode(text, add_special_tokens)

    def scores(self, fields: GenerationFields) -> Scores | None:
        """Return which log-probabilities a request wants to see, if any.

        Raises:
            InvalidRequestError: more than the operator allows.
        """
        num_top, num_prompt_top = fields.num_logprobs(), fields.prompt_logprobs
        if num_top is None and num_prompt_top is None:
            return None
        for count, param in (
            (num_top, "top_logprobs" if isinstance(fields, ChatRequest) else "logprobs"),
            (num_prompt_top, "prompt_logprobs"),
        ):
            if count is not None and count > self._max_logprobs:
                raise InvalidRequestError(f"At most {self._max_logprobs} are shown.", param=param)
        return Scores(self.model.token_texts, num_top, num_prompt_top)

    def take_lane(self) -> int:
        """Return the output thread that the next request's events go to."""
        self._lane = (self._lane + 1) % self._num_lanes
        return self._lane

    def deadline_of(self, exchange: Exchange) -> float:
        return exchange.times.arrival + self._timeout_s

    def _check_in_time(self, exchange: Exchange) -> None:
        if exchange.is_cancelled:
            raise RequestCancelledError("The client has gone.")
        if time.monotonic() >= self.deadline_of(exchange):
            raise DeadlineExceededError("The request waited longer than its deadline allows.")

    def _submit(self, exchange: Exchange, prepared: Prepared, constraints: Constraints) -> None:
        fields, times = prepared.fields, exchange.times
        n = fields.n or 1
        if len(prepared.prompts) * n > MAX_TOTAL_CHOICES:
            raise InvalidRequestError(f"More than {MAX_TOTAL_CHOICES} choices in one request.", param="n")
        vocabulary, rich = self.model.vocabulary, prepared.rich
        if fields.skip_special_tokens is False:
            vocabulary = self.model.verbatim.get()
        elif rich is not None and rich.make_parser is not None:
            vocabulary = self.model.dialect.vocabulary
        if fields.return_token_ids or fields.timings:
            shown = prepared.prompts if fields.return_token_ids else ()
            prepared.reply_format.extras = Extras(shown, n, times if fields.timings else None)
            if fields.return_token_ids:
                rich = replace(rich or RichOptions(), keeps_tokens=True)
        reply = Reply(
            exchange,
            self.engine,
            prepared.reply_format,
            vocabulary,
            is_streamed=bool(fields.stream),
            include_usage=fields.wants_usage() or bool(fields.timings),
            max_bytes=self._max_response_bytes,
        )
        lane = self.take_lane()
        replicas = [self.engine.place(prompt) for prompt in prepared.prompts]
        requests = [
            GenerationRequest(
                request_id=exchange.request_id,
                index=k * n + choice,
                prompt_ids=prompt,
                sampling=sampling_params(self.model, fields, prepared.max_tokens, len(prompt), choice, constraints),
                media=prepared.media,
                lane=lane,
                route=reply,
                deadline=self.deadline_of(exchange),
                times=times,
                replica=replica,
                cache_salt=fields.salt(),
                priority=fields.priority or 0,
            )
            for k, (prompt, replica) in enumerate(zip(prepared.prompts, replicas, strict=True))
            for choice in range(n)
        ]
        reply.expect(requests, vocabulary, sum(map(len, prepared.prompts)), rich)
        if prepared.echoes:
            reply.begin_with([echo for echo in prepared.echoes for _ in range(n)])
        times.submitted = time.monotonic()
        if not exchange.submit(self.engine, requests):
            reply.release()
            raise RequestCancelledError("The client has gone.")
