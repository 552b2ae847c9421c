"""Mutated external input: no process may crash, and no answer may be a server error."""
