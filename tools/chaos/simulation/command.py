"""The command line: many seeds, or some seeds with their logs."""

import argparse
import logging
import time
from collections import Counter
from collections.abc import Callable

from chaos import checker
from chaos.history import digest
from chaos.simulation.seed_run import Outcome, make_template, run_seed
from chaos.simulation.world import scratch_folder

_TOLD_EACH = 500


def run(arguments: list[str]) -> int:
    """Runs the simulations that the arguments ask for. Returns 1 if a promise was broken, else 0."""
    parser = argparse.ArgumentParser(prog="python -m chaos.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="Number of seeds, starting at --first.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, nargs="+", help="Run only these seeds, with their logs.")
    parser.add_argument("--trainers", type=int, default=1, choices=(1, 2, 3), help="Number of trainers.")
    parser.add_argument(
        "--gateways", type=int, default=1, choices=(1, 2, 3), help="Number of gateways, behind a router."
    )
    given = parser.parse_args(arguments)
    with scratch_folder() as folder:
        template = make_template(folder, given.gateways)

        def run_one(seed: int) -> Outcome:
            return run_seed(seed, template, given.trainers, given.gateways)

        if given.seed is not None:
            return _replay(given.seed, run_one)
        return _run_many(range(given.first, given.first + given.seeds), run_one)


def _replay(seeds: list[int], run_one: Callable[[int], Outcome]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(name)s %(message)s")
    outcomes = [run_one(seed) for seed in seeds]
    for outcome in outcomes:
        print(_line(outcome))
        print(checker.summary(outcome.violations))
    return int(any(outcome.violations for outcome in outcomes))


def _run_many(seeds: range, run_one: Callable[[int], Outcome]) -> int:
    logging.getLogger().addHandler(logging.NullHandler())
    begun = time.process_time()
    totals: Counter[str] = Counter()
    for seed in seeds:
        outcome = run_one(seed)
        totals.update(seeds=1, commands=outcome.commands, faults=outcome.faults, virtual_s=round(outcome.virtual_s))
        if outcome.violations:
            totals["broken"] += 1
            print(f"{_line(outcome)}\n{checker.summary(outcome.violations)}", flush=True)
        if totals["seeds"] % _TOLD_EACH == 0 or outcome.seed == seeds[-1]:
            print(_summary(totals, time.process_time() - begun), flush=True)
    return int(bool(totals["broken"]))


def _summary(totals: Counter[str], seconds: float) -> str:
    return (
        f"{totals['seeds']} seeds, {totals['broken']} broke a promise; {totals['commands']} commands, "
        f"{totals['faults']} faults, {totals['virtual_s'] / 3600:.1f} hours of their time in {seconds:.1f} s of "
        f"processor time, {1000 * seconds / totals['seeds']:.0f} ms per seed"
    )


def _line(outcome: Outcome) -> str:
    return (
        f"seed {outcome.seed}: {outcome.commands} commands, {outcome.faults} faults, {outcome.virtual_s:.0f} s, "
        f"{outcome.steps} steps, history {digest(outcome.trace)}"
    )
