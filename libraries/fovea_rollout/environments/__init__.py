"""Environments, and the records of datasets that make them."""
