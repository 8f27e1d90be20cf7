"""From a request's fields to `SamplingParams`. Preprocess threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ftserve.engine.errors import InvalidRequestError, RequestTooLongError
from ftserve.engine.grammar import Grammar, GrammarMaker
from ftserve.engine.types import SamplingParams
from ftserve.preprocess.tokens import Encode
from ftserve.server.model import ServedModel
from ftserve.server.structured import compile_structure
from ftserve.server.wire import ChatRequest, GenerationFields


class Constraints(NamedTuple):
    """What no choice of a request may say."""

    allowed_token_ids: tuple[int, ...]  # empty: all
    bad_words: tuple[tuple[int, ...], ...]
    grammar: Grammar | None
    grammar_after: tuple[int, ...]


def constraints_of(
    model: ServedModel,
    fields: GenerationFields,
    encode: Encode,
    *,
    make_grammar: Callable[[GrammarMaker], Grammar | None] | None,
    thought_end: str,
) -> Constraints:
    """Return what all choices of a request are held to, by its fields and by the grammar of a forced call.

    Raises:
        InvalidRequestError: naming the field.
        UnknownGrammarError: a grammar has to be compiled first.
    """
    allowed = tuple(fields.allowed_token_ids or ())
    if allowed and max(allowed) >= model.checkpoint.vocab_size:
        raise InvalidRequestError("A token id is outside the model's vocabulary.", param="allowed_token_ids")
    known = model.grammars.known
    grammar = compile_structure(fields.response_format, fields.structured_outputs, known)
    forced = None if make_grammar is None else make_grammar(known)
    if forced is not None:
        if grammar is not None:
            raise InvalidRequestError("A forced tool call leaves no room for another structure.", param="tool_choice")
        grammar = forced
    return Constraints(
        allowed,
        _spellings(fields.bad_words, encode) if fields.bad_words else (),
        grammar,
        tuple(encode(thought_end, False)) if grammar is not None and thought_end else (),
    )


def sampling_params(
    model: ServedModel,
    fields: GenerationFields,
    max_tokens: int | None,
    prompt_tokens: int,
    choice: int,
    constraints: Constraints,
) -> SamplingParams:
    """Return how to choose the tokens of one choice; what is not given has the model's defaults.

    Raises:
        RequestTooLongError: the model does not hold `prompt_tokens` and `max_tokens` more.
        InvalidRequestError: naming the field.
    """
    defaults = model.checkpoint.generation_defaults
    room = model.max_model_len - prompt_tokens
    if room < 1 or (max_tokens is not None and max_tokens > room):
        wanted = "" if max_tokens is None else f" and {max_tokens} more were asked for"
        raise RequestTooLongError(
            f"The model holds {model.max_model_len} tokens; the prompt has {prompt_tokens}{wanted}.",
            param="max_tokens" if room >= 1 else "messages" if isinstance(fields, ChatRequest) else "prompt",
        )

    def given(value: float | None, name: str, default: float) -> float:
        return value if value is not None else defaults.get(name, default)

    return SamplingParams(
        max_tokens=room if max_tokens is None else max_tokens,
        min_tokens=fields.min_tokens or 0,
        temperature=given(fields.temperature, "temperature", 1.0),
        top_p=given(fields.top_p, "top_p", 1.0),
        top_k=max(0, int(given(fields.top_k, "top_k", 0))),
        min_p=given(fields.min_p, "min_p", 0.0),
        repetition_penalty=given(fields.repetition_penalty, "repetition_penalty", 1.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_logit_bias(fields.logit_bias, model.checkpoint.vocab_size),
        seed=None if fields.seed is None else fields.seed + choice,
        stop=fields.stop_strings(),
        include_stop=bool(fields.include_stop_str_in_output),
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        allowed_token_ids=constraints.allowed_token_ids,
        bad_words=constraints.bad_words,
        grammar=constraints.grammar,
        grammar_after=constraints.grammar_after,
        num_logprobs=fields.num_logprobs(),
        num_prompt_logprobs=fields.num_prompt_logprobs(choice),
    )


def _spellings(words: Sequence[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the start of a text and behind a space."""
    spellings = []
    for word in words:
        bare = word.lstrip()
        if bare:
            spellings += [tuple(encode(bare, False)), tuple(encode(f" {bare}", False))]
    return tuple(dict.fromkeys(filter(None, spellings)))


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    pairs = tuple((int(token_id), value) for token_id, value in bias.items())
    if max(token_id for token_id, _ in pairs) >= vocab_size:
        raise InvalidRequestError("A token id is outside the model's vocabulary.", param="logit_bias")
    return pairs
