"""Checks Fovea's pinned packages for published vulnerabilities, and lists them in CycloneDX format."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
LOCKS = ("cpu", "gpu", "gpu-0.33", "uv")
"""Files in requirements/ with packages that reach users; the environments of optional tests do not."""
VULNERABLE, UNREACHABLE = 1, 3
_NO_ANSWER = ("ConnectionError", "Max retries exceeded", "Failed to resolve", "Failed to fetch", "Timeout")

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)


def lock(name: str) -> Path:
    """Returns a file of pinned packages."""
    return ROOT / "requirements" / f"{name}.txt"


def tool(*arguments: str) -> list[str]:
    """Returns a command that runs a tool pinned in requirements/audit.txt, in an environment of its own."""
    uv = str(Path(sys.executable).with_name("uv"))
    return [uv, "run", "--quiet", "--isolated", "--no-project", "--with-requirements", str(lock("audit")), *arguments]


def look_up(command: Sequence[str]) -> tuple[int, list[str]]:
    """Runs pip-audit on one file.

    Returns the exit code and a line for each vulnerability. A package without a lookup result counts as a failure,
    although pip-audit omits it and exits with 0.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return UNREACHABLE if any(word in done.stderr for word in _NO_ANSWER) else VULNERABLE, [last]
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    found = [
        f"{each['name']} {each['version']}: {bug['id']}, fixed in {', '.join(bug['fix_versions']) or 'no version'}"
        for each in packages
        for bug in each.get("vulns", ())
    ]
    if found:
        return VULNERABLE, found
    return (UNREACHABLE, [f"not looked up: {', '.join(skipped)}"]) if skipped else (0, [])


@app.command()
def check() -> None:
    """Check all pinned packages. The exit code is 0 if none is vulnerable, 1 if one is, 3 if the advisories cannot be
    reached.
    """
    codes = []
    for name in LOCKS:
        arguments = ("--vulnerability-service", "osv", "--format", "json", "--progress-spinner", "off")
        pinned = ("--require-hashes", "--disable-pip", "--no-deps", "--requirement", str(lock(name)))
        code, lines = look_up(tool("pip-audit", *arguments, *pinned))
        codes.append(code)
        verdict = {0: "no known vulnerability", VULNERABLE: "VULNERABLE", UNREACHABLE: "NOT CHECKED"}[code]
        typer.echo("\n  ".join([f"requirements/{name}.txt: {verdict}", *lines]))
    raise typer.Exit(VULNERABLE if VULNERABLE in codes else max(codes))


@app.command()
def sbom(folder: Annotated[Path, typer.Argument(help="Folder for the files.")] = Path("dist")) -> None:
    """Write the pinned packages with their hashes as CycloneDX JSON, one file per lock file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in LOCKS:
        file = folder / f"fovea-{name}.cdx.json"
        subprocess.run(
            tool("cyclonedx-py", "requirements", str(lock(name)), "--of", "JSON", "--output-file", str(file)),
            check=True,
        )
        typer.echo(f"{file}: {len(json.loads(file.read_text())['components'])} packages")


if __name__ == "__main__":
    app()
