"""Pages for people: `/` and `/docs`. Files of ours that load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

HTML_HEADERS = [
    ("content-type", "text/html; charset=utf-8"),
    ("content-security-policy", "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"),
]


def read_page(name: str) -> str:
    """Return a page."""
    return files("ftserve.server").joinpath("pages", f"{name}.html").read_text(encoding="utf-8")
