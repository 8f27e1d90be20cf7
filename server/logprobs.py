"""Log-probabilities as clients see them: OpenAI's shapes for chats and for completions, vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftserve.engine.types import GenerationRequest, TokenLogprobs
from ftserve.preprocess.text import make_detokenizer
from ftserve.preprocess.vocabulary import TokenKind, Vocabulary, json_escape
from ftserve.server.rich import Token

_LEAST = -9999.0  # stands for minus infinity, which JSON lacks


class TokenTexts:
    """What each token id is by itself: its bytes, and them as text.

    Shared by all output threads without a lock: an entry is made when it is first asked for. Two threads may both make
    it, of the same value; a list's item is replaced as a whole.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._members: list[str | None] = [None] * len(vocabulary)

    def data(self, token_id: int) -> bytes:
        """Return the bytes that the token stands for; a special token stands for its name."""
        vocabulary = self.vocabulary
        if raw := vocabulary.raw[token_id]:
            return raw
        if text := vocabulary.texts[token_id]:
            return text.encode()
        if vocabulary.kind is TokenKind.OPAQUE and (text := vocabulary.tokenizer.decode([token_id])):
            return text.encode()
        return (vocabulary.tokenizer.id_to_token(token_id) or "").encode()

    def text(self, token_id: int, *, mark: str = "") -> str:
        r"""Return the bytes as text; `mark` and `\xNN` tell of bytes that are not whole characters."""
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return mark + data.decode(errors="backslashreplace")

    def members(self, token_id: int) -> str:
        """Return the members `token` and `bytes` of a JSON object."""
        found = self._members[token_id]
        if found is None:
            numbers = ",".join(map(str, self.data(token_id)))
            found = f'"token":"{json_escape(self.text(token_id))}","bytes":[{numbers}]'
            self._members[token_id] = found
        return found


@dataclass(frozen=True, slots=True)
class Scores:
    """Which log-probabilities the choices of a request show. Immutable, shared by them."""

    texts: TokenTexts
    num_top: int | None  # beside each generated token; None: not even its own
    num_prompt_top: int | None  # the same for `prompt_logprobs`

    def of_chat(self, tokens: Sequence[Token]) -> str:
        """Return the `logprobs` of a choice of a chat, for some of its tokens."""
        if self.num_top is None:
            return "null"
        members = self.texts.members
        entries = []
        for token in tokens:
            scores = token.logprobs
            if scores is not None:
                top = [
                    f'{{{members(top_id)},"logprob":{_number(logprob)}}}'
                    for top_id, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
                ]
                entries.append(
                    f'{{{members(token.token_id)},"logprob":{_number(scores.logprob)},"top_logprobs":[{",".join(top)}]}}'
                )
        return f'{{"content":[{",".join(entries)}],"refusal":null}}'

    def of_completion(self, tokens: Sequence[Token]) -> str:
        """Return the `logprobs` of a choice of a completion, for some of its tokens."""
        if self.num_top is None:
            return "null"
        numbers = ["null" if t.logprobs is None else _number(t.logprobs.logprob) for t in tokens]
        names = [self._name(token.token_id) for token in tokens]
        tops = ["null" if t.logprobs is None else self._top(t.logprobs, self.num_top) for t in tokens]
        offsets = [str(token.offset) for token in tokens]
        return (
            f'{{"text_offset":[{",".join(offsets)}],"token_logprobs":[{",".join(numbers)}],'
            f'"tokens":[{",".join(names)}],"top_logprobs":[{",".join(tops)}]}}'
        )

    def of_prompt(self, scores: Sequence[TokenLogprobs | None] | None) -> str:
        """Return `prompt_logprobs`: for each token null, or an object of ids, the token's own first."""
        if self.num_prompt_top is None or scores is None:
            return "null"
        return f"[{','.join(['null' if score is None else self._of_prompt_token(score) for score in scores])}]"

    def _of_prompt_token(self, score: TokenLogprobs) -> str:
        entries = {score.token_id: (score.logprob, score.rank)}
        top = zip(score.top_ids[: self.num_prompt_top], score.top_logprobs, strict=False)
        for rank, (token_id, logprob) in enumerate(top, 1):
            entries.setdefault(token_id, (logprob, rank))
        members = [
            f'"{token_id}":{{"logprob":{_number(logprob)},"rank":{rank},'
            f'"decoded_token":"{json_escape(self.texts.text(token_id))}"}}'
            for token_id, (logprob, rank) in entries.items()
        ]
        return f"{{{','.join(members)}}}"

    def _top(self, score: TokenLogprobs, count: int) -> str:
        """Return the likeliest tokens by name, and the token itself; of two with one name, the likelier."""
        entries: dict[str, float] = {}
        for token_id, logprob in zip(score.top_ids[:count], score.top_logprobs, strict=False):
            entries.setdefault(self._name(token_id), logprob)
        entries.setdefault(self._name(score.token_id), score.logprob)
        return f"{{{','.join([f'{name}:{_number(logprob)}' for name, logprob in entries.items()])}}}"

    def _name(self, token_id: int) -> str:
        return f'"{json_escape(self.texts.text(token_id, mark="bytes:"))}"'


def prompt_tokens(
    request: GenerationRequest, scores: Sequence[TokenLogprobs | None], text: str, texts: TokenTexts
) -> list[Token]:
    """Return the tokens of a prompt that is echoed as `text`, with where they begin in it.

    What of a token is not in the text, such as a mark that the tokenizer has put before it, takes no room.
    """
    detokenizer, at = make_detokenizer(texts.vocabulary), 0
    tokens: list[Token] = []
    for token_id, score in zip(request.prompt_ids, scores, strict=True):
        tokens.append(Token(token_id, score, at))
        piece = detokenizer.push((token_id,)) or ("" if detokenizer.is_pending else texts.text(token_id))
        for spelling in (piece, piece.removeprefix(" ")):
            if spelling and text.startswith(spelling, at):
                at += len(spelling)
                break
    return tokens


def _number(logprob: float) -> str:
    return f"{max(logprob, _LEAST):.7g}"
