"""The served model as the front end knows it: names, limits, tokenizer, template. Read by all threads, written once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from ftserve.engine.checkpoint import Checkpoint
from ftserve.engine.grammar import GrammarCompiler
from ftserve.preprocess.template_sandbox import TemplateSandbox
from ftserve.preprocess.tokens import fastokens_is_exact, load_tokenizer
from ftserve.preprocess.vocabulary import VerbatimVocabulary, Vocabulary, build_vocabulary
from ftserve.server.dialect import Dialect
from ftserve.server.logprobs import TokenTexts


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under one public name."""

    name: str
    checkpoint: Checkpoint
    embeds: bool  # makes embeddings, and no text
    max_model_len: int  # tokens of prompt and output together
    tokenizer_json: Path
    use_fastokens: bool
    vocabulary: Vocabulary
    verbatim: VerbatimVocabulary  # the same with special tokens as text
    templates: TemplateSandbox | None  # for those of requests; None: they may not bring any
    token_texts: TokenTexts
    dialect: Dialect
    grammars: GrammarCompiler
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        name: str,
        max_model_len: int,
        embeds: bool = False,
        takes_templates: bool = False,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> ServedModel:
        """Read the tokenizer and build its tables.

        Raises:
            ValueError: the chat template does not compile.
        """
        tokenizer = load_tokenizer(checkpoint.tokenizer_json)
        vocabulary = build_vocabulary(tokenizer, size=checkpoint.vocab_size)
        return cls(
            name=name,
            embeds=embeds,
            checkpoint=checkpoint,
            max_model_len=max_model_len,
            tokenizer_json=checkpoint.tokenizer_json,
            use_fastokens=fastokens_is_exact(checkpoint.tokenizer_json, tokenizer),
            vocabulary=vocabulary,
            verbatim=VerbatimVocabulary(vocabulary),
            templates=TemplateSandbox(checkpoint.special_tokens) if takes_templates else None,
            token_texts=TokenTexts(vocabulary),
            dialect=Dialect.of(checkpoint, vocabulary, tool_parser, reasoning_parser),
            grammars=GrammarCompiler(
                checkpoint.tokenizer_json, vocab_size=len(vocabulary), eos_token_ids=checkpoint.eos_token_ids
            ),
        )

    def close(self) -> None:
        """End the helper processes."""
        self.grammars.close()
        if self.templates is not None:
            self.templates.close()

    def public(self) -> dict[str, object]:
        """Return the model as OpenAI's API shows it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "ftserve",
            "max_model_len": self.max_model_len,
        }
