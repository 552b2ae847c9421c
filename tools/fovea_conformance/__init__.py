"""A program that checks any server against the Tinker API, with the acceptance checks C1 to C131."""
