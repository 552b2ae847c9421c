"""`python -m fovea_parity DIR`, which `fovea models check DIR` runs: what works with a checkpoint, a line per part."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from fovea_parity.finding import Finding, reason, run_apart
from fovea_parity.parts import PARTS


def main() -> None:
    """Exit status 0 if every part works, 1 if one does not."""
    parser = argparse.ArgumentParser(
        prog="fovea models check",
        description="Try a checkpoint on this machine's CPU with as few layers as show each kind: the renderer against "
        "the checkpoint's own processor, the trainer's packed forward against transformers' own, and what vLLM makes "
        "of an image against the renderer. Prints a line per part.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint directory; weights may be missing")
    parser.add_argument("--whole", action="store_true", help="take all layers")
    arguments = parser.parse_args()
    directory: Path = arguments.directory.expanduser()
    if not (directory / "config.json").is_file():
        parser.error(f"{directory} has no config.json; name a checkpoint directory")
    # Not before: help and a wrong use would wait five seconds for transformers.
    from transformers.utils import logging

    from fovea_parity.shallow import cut

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="fovea-check-") as folder:
        if not arguments.whole:
            try:
                count = cut(directory, Path(folder))
            except Exception as error:  # whatever transformers says of a checkpoint is the answer
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
    """`renderer  works: ...` or `renderer  does not work: ...`."""
    return f"{finding.part:14}{'works' if finding.works else 'does not work'}: {finding.says}"


if __name__ == "__main__":
    main()
