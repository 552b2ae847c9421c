"""The checks, one file a section of the contract."""
