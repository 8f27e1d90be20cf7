"""How the served model speaks: its ways of calling tools and of thinking. Read by all threads, written once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ftserve.engine.checkpoint import Checkpoint
from ftserve.preprocess.chat_traits import ChatTraits
from ftserve.preprocess.vocabulary import Vocabulary
from ftserve.server.parsers import registry
from ftserve.server.parsers.bare import ForcedParser
from ftserve.server.parsers.harmony import HarmonyParser
from ftserve.server.parsers.registry import MakeParser, ThoughtFormat, ToolFormat
from ftserve.server.parsers.think import ThinkParser
from ftserve.server.tools import CallPlan

NONE = "none"  # the name that turns a parser off
_HARMONY = "harmony"
_PROMPT_END_CHARS = 256  # hold a marker and the white space behind it
_HARMONY_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class Dialect:
    """The model's formats, and what its chat template wants."""

    tool_parser: str  # its name, for the start-up line
    thought_parser: str
    tools: ToolFormat
    thoughts: ThoughtFormat | None
    may_think: bool  # unasked: a thought may come even where the prompt does not open it
    traits: ChatTraits
    vocabulary: Vocabulary  # in which the formats' markers are text, special tokens or not

    @classmethod
    def of(cls, checkpoint: Checkpoint, vocabulary: Vocabulary, tool_parser: str, thought_parser: str) -> Dialect:
        """Choose parsers by name, or with "auto" by what the chat template shows.

        Raises:
            ValueError: the template does not compile.
        """
        source = checkpoint.chat_template or ""
        if tool_parser == "auto":
            tool_parser = registry.detect(source, registry.TOOL_PARSERS) or registry.DEFAULT_TOOL_PARSER
        tool_parser = registry.TOOL_PARSER_ALIASES.get(tool_parser, tool_parser)
        is_chosen = thought_parser != "auto"
        if not is_chosen:
            thought_parser = registry.detect(source, registry.THOUGHT_PARSERS) or NONE
        thought_parser = registry.THOUGHT_PARSER_ALIASES.get(thought_parser, thought_parser)
        if tool_parser == _HARMONY:
            thought_parser = _HARMONY
        tools, thoughts = registry.TOOL_PARSERS[tool_parser], registry.THOUGHT_PARSERS.get(thought_parser)
        markers = (*tools.markers, *((thoughts.start, thoughts.end) if thoughts is not None else ()))
        return cls(
            tool_parser,
            thought_parser,
            tools,
            thoughts,
            thoughts is not None and (is_chosen or thoughts.start in source),
            ChatTraits.of(source, checkpoint.special_tokens) if source else ChatTraits(),
            vocabulary.showing(markers),
        )

    @property
    def is_harmony(self) -> bool:
        return self.tool_parser == _HARMONY

    def parser(self, prompt: str, plan: CallPlan | None) -> MakeParser | None:
        """Return what makes the parser of one request's choices; None if their text is plain.

        The end of the prompt tells whether a thought has begun.
        """
        if self.is_harmony:
            return HarmonyParser
        calls: MakeParser | None = None
        if plan is not None:
            calls = partial(ForcedParser, plan.forced_name) if plan.is_forced else self.tools.prepare(plan.schemas)
        thoughts = self.thoughts
        if thoughts is None:
            return calls
        end = prompt[-_PROMPT_END_CHARS:].rstrip()
        is_open = end.endswith(thoughts.start) or (thoughts.is_always_open and not end.endswith(thoughts.end))
        return lambda: ThinkParser(thoughts.start, thoughts.end, is_open=is_open, then=calls and calls())

    def thought_end(self, prompt: str) -> str:
        """Return the text after which a grammar begins; empty if the answer begins at once."""
        if self.is_harmony:
            return _HARMONY_FINAL
        if self.thoughts is None:
            return ""
        end = prompt[-_PROMPT_END_CHARS:].rstrip()
        is_over = end.endswith(self.thoughts.end)
        return self.thoughts.end if not is_over and (self.may_think or end.endswith(self.thoughts.start)) else ""


def describe(dialect: Dialect) -> str:
    """Return the parsers as the start-up line shows them."""
    return f"tool calls {dialect.tool_parser}, thoughts {dialect.thought_parser}"
