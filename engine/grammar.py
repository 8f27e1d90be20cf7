"""What output has to look like: JSON of a schema, a regular expression, a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled constraint. Any thread may read it; whoever follows it copies `matcher` first."""

    source: str  # as llguidance takes it
    matcher: Any  # llguidance.LLMatcher at the beginning; nobody advances it
