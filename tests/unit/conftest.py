"""Settings of all unit tests: on a busy machine an example may take seconds, and no test asserts a time."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
