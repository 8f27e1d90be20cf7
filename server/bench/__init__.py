"""`ftserve bench`: load over HTTP from a process of its own, and what became of it."""
