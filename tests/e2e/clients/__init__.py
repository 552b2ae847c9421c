"""The clients in other languages."""
