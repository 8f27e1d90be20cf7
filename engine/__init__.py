"""The engine: one thread that owns the device, and the hand-off into it. Imports nothing of ours above it."""
