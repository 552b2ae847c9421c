"""Runs each check against servers with one fault."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from fovea_conformance.__main__ import load
from fovea_conformance.proxy import Proxy
from fovea_conformance.runner import Verdict, run_check
from fovea_conformance.target import Options
from tests.e2e.conformance.corruption import Wrong
from tests.e2e.stack import API_KEY, Stack

CHECKS = {one.check_id: one for one in load()}
WAITING = ("C6", "C43", "C50", "C76")
"""Checks that wait half a minute for an event that a faulty server never produces; they need no processor."""


def judged(stack: Stack, check_id: str, wrong: Wrong) -> Verdict:
    """Returns the verdict of a check on Fovea behind a faulty proxy."""
    with Proxy(stack.base_url, before=wrong.before, after=wrong.after) as proxy:
        options = Options(proxy.url, API_KEY, stack.model_name, vlm=True, long_job_s=40.0, checkpoint=str(stack.model))
        return run_check(CHECKS[check_id], options)


@contextmanager
def judging(stack: Stack, wrong: Mapping[str, Mapping[str, Wrong]]) -> Iterator[Callable[[str, str], Verdict]]:
    """Yields a function that runs a check, given its id, on the named faulty server. Checks in
    `WAITING` start at once.
    """
    with ThreadPoolExecutor() as pool:
        begun = {
            (check_id, name): pool.submit(judged, stack, check_id, server)
            for check_id in WAITING
            for name, server in wrong.get(check_id, {}).items()
        }

        def verdict(check_id: str, name: str) -> Verdict:
            if future := begun.get((check_id, name)):
                return future.result()
            return judged(stack, check_id, wrong[check_id][name])

        yield verdict
