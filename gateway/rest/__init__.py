"""Tinker's REST API: decode, one call, encode."""
