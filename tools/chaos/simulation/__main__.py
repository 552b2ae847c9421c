"""Runs simulations: `python -m chaos.simulation --seeds 10000`, or `--seed N...` for some seeds with their logs."""

import os
import sys


def main() -> int:
    """Prints the results. Returns 1 if a promise was broken, else 0."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable,
            [sys.executable, "-m", "chaos.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    from chaos.simulation import surroundings

    surroundings.install()
    from chaos.simulation.command import run  # after install(): modules keep references to functions they import

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
