"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from ftserve.server.exchange import Exchange
from ftserve.server.problems import HttpError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})  # probes have no key


class ApiKeys:
    """The keys that open this server; without any it is open to all. Read by HTTP threads, never changed."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def check(self, exchange: Exchange) -> None:
        """Let a request pass.

        Raises:
            HttpError: 401, the request has no key or a wrong one.
        """
        if not self._keys:
            return
        scheme, _, given = (exchange.headers.get("authorization") or "").partition(" ")
        # Every key is compared, in constant time, so that the time tells nothing.
        matches = [hmac.compare_digest(key, given.strip().encode()) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise HttpError(401, "The API key is missing or wrong; send 'authorization: Bearer KEY'.")
