"""The `fovea` commands of README and guides run as they are written there, beside a running Fovea.

`ELSEWHERE` lists the commands that other tests run, because they start, end or load a whole Fovea.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import tinker

from tests.e2e.stack import Stack
from tests.unit.docs.test_code_blocks import COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "up": "tools/fovea_demo/up.py",
    "down": "tests/unit/fovea/cli/test_cli.py",
    "drain": "tests/e2e/test_several_trainers.py",
    "evaluate": "tests/e2e/fovea_data/test_evaluate.py",
    "export": "tests/e2e/fovea_data/test_export.py",
    "conformance": "tests/contract/packages/test_wheel.py",
    "checkpoints upload": "tests/contract/gateway/test_cli_commands.py",
    "downgrade": "tests/unit/gateway/database/test_migrations.py",
}
"""The commands that run elsewhere, and a file that runs each."""
_NAMED = ("keys", "keys revoke", "owners set", "plan", "plan --shared-base")
"""Commands that sentences name without the arguments that they need."""
_ENDLESS = "-f"
DOCUMENTED = sorted(
    {
        " ".join(words[1:])
        for where, words in COMMANDS
        if words[0] == "fovea" and where.startswith(("README.md", "docs/guides/")) and _ENDLESS not in words
    }
)
HERE = [command for command in DOCUMENTED if not command.startswith(tuple(ELSEWHERE)) and command not in _NAMED]


def _run(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fovea.cli.main", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `fovea up` seems to have been started."""
    folder = tmp_path_factory.mktemp("beside")
    (folder / ".fovea").symlink_to(stack.log.parent)
    return folder


@pytest.mark.parametrize("command", HERE)
def test_it_runs_as_it_is_documented(folder: Path, service: tinker.ServiceClient, command: str) -> None:
    words = command.split()
    if "KEY_ID" in words:
        _run(folder, ["keys", "create", "--owner", "ann"])
        listed = _run(folder, ["keys", "list"]).stdout
        words[words.index("KEY_ID")] = next(line for line in listed.splitlines() if " ann" in line).split()[0]
    stands_for = {"NAME": "ann", "SERVICE": "trainer", "SESSION_ID": service.holder.get_session_id()}
    done = _run(folder, [stands_for.get(word, word) for word in words])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout + done.stderr, "it says what it has done"


def test_each_other_command_runs_in_the_named_file() -> None:
    for command, path in ELSEWHERE.items():
        assert any(one.startswith(command) for one in DOCUMENTED), f"no page has `fovea {command}` any more"
        assert command.split()[-1] in (ROOT / path).read_text()
    assert len(HERE) >= 15
