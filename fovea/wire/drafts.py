"""What folders of checkpoints are called out of their place: a trainer that dies leaves them to the gateway."""

DRAFT = ".tmp-"
"""After the folder's name: what is being written, to take its place."""

REPLACED = ".old-"
"""After the folder's name: what has lost its place, to be removed."""

PLAIN = ".plain"
"""After the folder's name: an export before it is encrypted."""
