"""Renders chat templates that requests bring along, in a process that may be killed.

A template is a program: jinja2's sandbox keeps it from our objects, and nothing there bounds its time and memory. What
is compiled is never freed on 3.13t, either. So each is compiled and rendered in a fork that ends with it.

Any thread; one template is rendered at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.sandbox import Sandbox, SandboxLimitError, serve
from ftserve.preprocess.chat import ChatTemplate

_CPU_SECONDS = 1.0
_WALL_SECONDS = 10.0  # of a loaded machine, for the same
_MEMORY_BYTES = 512 * 2**20
_STACK_BYTES = 8 * 2**20


class TemplateSandbox:
    """Where templates of requests are rendered."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._sandbox = Sandbox(__name__, wall_s=_WALL_SECONDS)

    def render(self, source: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the prompt text, as `ChatTemplate.render` does.

        Raises:
            InvalidRequestError: the template does not compile, refuses these messages, fails, or takes too much.
        """
        try:
            answer = self._sandbox.ask(
                {"source": source, "tokens": self._special_tokens, "messages": messages, "options": options}
            )
        except SandboxLimitError:
            raise InvalidRequestError(
                f"The template takes more than {_CPU_SECONDS:g} s or too much memory.", param="chat_template"
            ) from None
        except (ValueError, RecursionError):
            raise InvalidRequestError("The messages are nested too deeply.", param="messages") from None
        if "error" in answer:
            raise InvalidRequestError(answer["error"], param="chat_template")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the helper process."""
        self._sandbox.close()


def _render(question: Any) -> dict[str, Any]:
    try:
        template = ChatTemplate(question["source"], question["tokens"])
        return {"text": template.render(question["messages"], **question["options"])}
    except ValueError as exc:
        return {"error": f"{str(exc)[:500]}."}
    except InvalidRequestError as exc:
        return {"error": exc.message}


if __name__ == "__main__":
    serve(_render, cpu_s=_CPU_SECONDS, memory_bytes=_MEMORY_BYTES, stack_bytes=_STACK_BYTES)
