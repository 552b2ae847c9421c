"""The checks, with one or more files per section of the contract."""
