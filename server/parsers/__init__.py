"""Parsers of what models write besides plain text: tool calls and thoughts. `registry.py` lists them by name."""
