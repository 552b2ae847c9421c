"""Sampling sessions, samples from them, and what is scored in prompts."""
