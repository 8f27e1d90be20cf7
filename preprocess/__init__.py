"""From a request's bytes to what the engine takes, and from its tokens back to text. Runs on pool threads."""
