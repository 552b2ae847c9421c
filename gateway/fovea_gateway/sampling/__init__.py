"""Sampling sessions, samples from them, and the scoring of prompts."""
