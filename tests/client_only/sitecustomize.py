"""Hides torch. Python imports this module first in every process with its folder in PYTHONPATH."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment] # the documented way to make an import fail
