"""The acceptance checks of the Tinker API, C1 to C119, as a program for any server."""
