"""A check, made on a server that is wrong in one way."""

from conformance.__main__ import load
from conformance.proxy import Proxy
from conformance.runner import Verdict, run_check
from conformance.target import Options
from tests.e2e.conformance.corruption import Wrong
from tests.e2e.stack import API_KEY, Stack

CHECKS = {one.check_id: one for one in load()}


def judged(stack: Stack, check_id: str, wrong: Wrong) -> Verdict:
    """The verdict of a check on Fovea behind a proxy that makes it wrong."""
    with Proxy(stack.base_url, before=wrong.before, after=wrong.after) as proxy:
        options = Options(proxy.url, API_KEY, stack.model_name, vlm=True, long_job_s=40.0)
        return run_check(CHECKS[check_id], options)
