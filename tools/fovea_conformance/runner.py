"""Runs checks one after another.

Checks that mostly wait run beside the others, and checks that restart the server run last.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fovea_conformance.check import Check, Failed, NotApplicable, Refused, Status
from fovea_conformance.target import Options, Target

_ENDING_S = 15.0


@dataclass(frozen=True)
class Verdict:
    """The result of one check."""

    check: Check
    status: Status
    detail: str
    seconds: float


def run_checks(
    checks: Sequence[Check], options: Options, report: Callable[[Verdict], None], started: Callable[[Check], None]
) -> list[Verdict]:
    """Runs checks; returns their verdicts.

    Calls `report` after each check, in any thread, but never twice at the same time.
    """
    verdicts: dict[str, Verdict] = {}
    lock = threading.Lock()

    def run(one: Check) -> None:
        verdict = run_check(one, options)
        with lock:
            verdicts[one.check_id] = verdict
            report(verdict)

    background = [threading.Thread(target=run, args=[one], daemon=True) for one in checks if one.background]
    for thread in background:
        thread.start()
    for one in checks:
        if not one.background and not one.alone:
            started(one)
            run(one)
    for thread in background:
        thread.join()
    for one in checks:
        if one.alone:
            started(one)
            run(one)
    return [verdicts[one.check_id] for one in checks]


def run_check(one: Check, options: Options) -> Verdict:
    """Runs one check in its own thread, so that a server that never responds cannot hang the suite."""
    begun = time.monotonic()
    if one.needs_images and not options.vlm:
        return Verdict(one, Status.NOT_APPLICABLE, "needs a model that takes images (--vlm)", 0.0)
    outcome: list[tuple[Status, str]] = []

    def work() -> None:
        target = Target(options)
        outcome.append(_judge(one, target))
        target.close()

    timeout_s = one.timeout_s + (max(options.long_job_s, options.session_ttl_s) if one.background else 0.0)
    thread = threading.Thread(target=work, daemon=True, name=one.check_id)
    thread.start()
    thread.join(timeout_s)
    if outcome:
        thread.join(_ENDING_S)
        status, detail = outcome[0]
    else:
        status, detail = Status.FAILED, f"no verdict after {timeout_s:.0f} s: something hangs"
    return Verdict(one, status, detail, time.monotonic() - begun)


def _judge(one: Check, target: Target) -> tuple[Status, str]:
    try:
        return Status.PASSED, one.run(target) or "as the contract says"
    except NotApplicable as reason:
        return Status.NOT_APPLICABLE, str(reason)
    except Refused as reason:
        return Status.REFUSED, str(reason)
    except Failed as reason:
        return Status.FAILED, str(reason)
    except TimeoutError as error:
        return Status.FAILED, f"TimeoutError: {str(error) or 'a result did not come'}"
    except Exception as error:  # whatever a foreign server makes the SDK raise is a verdict on the server
        return Status.FAILED, f"{type(error).__name__}: {error}"
