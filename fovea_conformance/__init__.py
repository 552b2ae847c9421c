"""The acceptance checks of the Tinker API, C1 to C123, as a program for any server."""
