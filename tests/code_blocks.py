"""The Python programs of the guides, for tests that run them."""

import re
import textwrap
from pathlib import Path

_GUIDES = Path(__file__).parents[1] / "docs" / "guides"


def programs(guide: str) -> list[str]:
    """Returns the Python blocks of a guide in order, without the indentation of lists."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```", (_GUIDES / guide).read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]
