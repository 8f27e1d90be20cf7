"""Cross-origin requests: which web pages may call this server from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from ftserve.server.exchange import Exchange

_PREFLIGHT_AGE_S = 600


class Cors:
    """Read by HTTP threads, never changed."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Let pages of `origins` call; `*` stands for all of them, and an empty list for none."""
        self._origins = frozenset(origins)

    def admit(self, exchange: Exchange) -> bool:
        """Add what the browser wants to see; True if that was the whole answer (a preflight)."""
        if not self._origins:
            return False
        origin = exchange.headers.get("origin")
        if origin is None or not ("*" in self._origins or origin in self._origins):
            return False
        exchange.extra_headers += (("access-control-allow-origin", origin), ("vary", "origin"))
        if exchange.method != "OPTIONS" or exchange.headers.get("access-control-request-method") is None:
            return False
        wanted = exchange.headers.get("access-control-request-headers") or "authorization, content-type"
        allowed = [
            ("access-control-allow-methods", "GET, POST, DELETE"),
            ("access-control-allow-headers", wanted),
            ("access-control-max-age", str(_PREFLIGHT_AGE_S)),
        ]
        exchange.respond(204, allowed, "")
        return True
