"""Policies, which sample from a model."""
