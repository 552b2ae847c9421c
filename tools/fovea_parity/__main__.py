"""Entry point of `python -m fovea_parity DIR`, which `fovea models check DIR` runs. Prints one line per component."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from fovea_parity.finding import Finding, reason, run_apart
from fovea_parity.parts import PARTS


def main() -> None:
    """Checks a checkpoint; exits with status 0 if every component works with it, else with 1."""
    parser = argparse.ArgumentParser(
        prog="fovea models check",
        description="Check a checkpoint on this machine's CPU. Compares the renderer with the checkpoint's own "
        "processor, the trainer's packed forward pass with the one of transformers, and vLLM's processing of images "
        "with the renderer. Uses only the first layers, at least one of each kind. Prints one line per component.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint directory; weights may be missing")
    parser.add_argument("--whole", action="store_true", help="use all layers")
    arguments = parser.parse_args()
    directory: Path = arguments.directory.expanduser()
    if not (directory / "config.json").is_file():
        parser.error(f"{directory} has no config.json; pass a checkpoint directory")
    # Imported late, because transformers takes five seconds, which help and usage errors do not need.
    from transformers.utils import logging

    from fovea_parity.shallow import cut

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="fovea-check-") as folder:
        if not arguments.whole:
            try:
                count = cut(directory, Path(folder))
            except Exception as error:  # any error of transformers is the result of the check
                print(line(Finding("transformers", False, reason(error))))
                raise SystemExit(1) from None
            print(f"{directory}: the first {count} layers, in float32")
            directory = Path(folder)
        findings = []
        for part in PARTS:
            findings += run_apart(part, [directory])
            print(line(findings[-1]), flush=True)
    raise SystemExit(0 if all(finding.works for finding in findings) else 1)


def line(finding: Finding) -> str:
    """Returns the line for a finding: `renderer  works: ...` or `renderer  does not work: ...`."""
    return f"{finding.part:14}{'works' if finding.works else 'does not work'}: {finding.says}"


if __name__ == "__main__":
    main()
