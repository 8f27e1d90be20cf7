"""`POST /tokenize` and `POST /detokenize`, with the fields that vLLM's clients use."""

from __future__ import annotations

import json
import time

from ftserve.engine.errors import InvalidRequestError
from ftserve.server.exchange import Exchange
from ftserve.server.generation import GenerationWorker
from ftserve.server.messages import for_template
from ftserve.server.problems import JSON_HEADERS
from ftserve.server.wire import DetokenizeRequest, TokenizeRequest, parse, text_of


def answer_tokenize(worker: GenerationWorker, exchange: Exchange) -> None:
    """Answer with the token ids of a text, or of chat messages behind the template. Preprocess thread."""
    fields = parse(TokenizeRequest, exchange.take_body())
    if fields.model is not None:
        worker.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("Give either 'prompt' or 'messages'.", param="prompt")
    if fields.messages is not None:
        text = worker.render(for_template(text_of(fields.messages), worker.model.dialect.traits), fields)
        ids = worker.tokenize(text, add_special_tokens=bool(fields.add_special_tokens))
    else:
        ids = worker.tokenize(fields.prompt or "", add_special_tokens=fields.add_special_tokens is not False)
    content: dict[str, object] = {
        "count": len(ids),
        "max_model_len": worker.model.max_model_len,
        "tokens": ids.tolist(),
    }
    if fields.return_token_strs:
        id_to_token = worker.model.vocabulary.tokenizer.id_to_token
        content["token_strs"] = [id_to_token(token_id) for token_id in ids]
    _answer(worker, exchange, content)


def answer_detokenize(worker: GenerationWorker, exchange: Exchange) -> None:
    """Answer with the text of token ids, special tokens included. Preprocess thread."""
    fields = parse(DetokenizeRequest, exchange.take_body())
    if fields.model is not None:
        worker.check_model(fields.model)
    if max(fields.tokens, default=0) >= worker.model.checkpoint.vocab_size:
        raise InvalidRequestError("A token id is outside the model's vocabulary.", param="tokens")
    text = worker.model.vocabulary.tokenizer.decode(fields.tokens, skip_special_tokens=False)
    _answer(worker, exchange, {"prompt": text})


def _answer(worker: GenerationWorker, exchange: Exchange, content: dict[str, object]) -> None:
    exchange.times.finished = time.monotonic()
    worker.recorder.count("200")
    exchange.respond(200, JSON_HEADERS, json.dumps(content, ensure_ascii=False))
