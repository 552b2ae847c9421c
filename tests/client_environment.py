"""The environment of a program that only uses the client: it cannot import torch."""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "client_only"


def client_environment(**variables: str) -> dict[str, str]:
    """Returns the environment of this process with `variables`, and with torch hidden from Python.

    Torch belongs to the services; an installation of the client does not have it. The Tinker SDK and transformers
    import torch where they find it, which takes five of the seven CPU seconds of a short program.
    """
    quiet = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}  # its advice to install torch
    folders = [str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(folders)} | variables
