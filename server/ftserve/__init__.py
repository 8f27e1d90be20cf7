"""ftserve: an OpenAI-compatible LLM and VLM server in one process of free-threaded Python."""

__version__ = "0.1.0"
