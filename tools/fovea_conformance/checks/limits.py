"""Section D: the length of the context, back-pressure and the prefix cache."""

import time
import uuid

import tinker
from starlette.responses import Response
from tinker import types

from fovea_conformance.agreement import PATIENCE_S, draw
from fovea_conformance.check import check, expect
from fovea_conformance.proxy import Exchange
from fovea_conformance.target import Target

_LONG = 512


@check("C72", "Prompt + max_tokens over the context: HTTP 400 with the recognised wording, no retries")
def c72_context(target: Target) -> str:
    """Samples a short prompt with max_tokens of the whole context. A proxy counts the requests."""
    listed = target.http.get("get_server_capabilities").raise_for_status().json()["supported_models"]
    context = next(one["max_context_length"] for one in listed if one["model_name"] == target.model)
    proxy = target.proxy()
    sampler = target.sampler(target.service(proxy)).result(PATIENCE_S)
    prompt = target.prompt(target.tokens(10))
    try:
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=context)).result(PATIENCE_S)
    except tinker.APIStatusError as error:
        status, message = error.status_code, str(error)
    else:
        status, message = 200, "was accepted"
    expect(status == 400, f"HTTP {status}: {message}")
    wording = f"10 prompt tokens + {context} max_tokens > {context}"
    for part in ("prompt length plus max_tokens exceeds", wording):
        expect(part.lower() in message.lower(), f"the message has no {part!r}: {message}")
    tries = len(list(proxy.of("asample")))
    expect(tries == 1, f"the SDK sent it {tries} times")
    return f"400 {wording!r}, sent once"


@check("C73", "429 on asample makes the client back off and finish; same seq_id resent")
def c73_backpressure(target: Target) -> str:
    """Responds with 429 twice in a proxy, the second time after the server accepted the request.

    The third attempt must get the same ids.
    """
    accepted: list[dict[str, object]] = []

    def before(one: Exchange) -> Response | None:
        first = one.route == "asample" and len(list(proxy.of("asample"))) == 1
        return Response("too many requests", status_code=429) if first else None

    def after(one: Exchange) -> Response | None:
        if one.route == "asample" and one.status == 200:
            accepted.append(one.answer_json())
            return Response("too many requests", status_code=429) if len(accepted) == 1 else None
        return None

    proxy = target.proxy(before=before, after=after)
    sampler = target.sampler(target.service(proxy)).result(PATIENCE_S)
    begun = time.monotonic()
    answer = draw(sampler, target.prompt(), 2, max_tokens=4)
    waited = time.monotonic() - begun
    sent = [one.json()["seq_id"] for one in proxy.of("asample")]
    expect(len(sent) == 3 and len(set(sent)) == 1, f"seq ids {sent}, expected the same three times")
    expect(waited >= 2, f"finished after {waited:.1f} s, expected a second of back-off after each 429")
    one, two = accepted
    for name in ("request_id", "sample_sequence_ids"):
        expect(one.get(name) == two.get(name), f"{name} {one.get(name)} became {two.get(name)}")
    expect(len(answer.sequences) == 2, f"{len(answer.sequences)} sequences")
    return f"sent 3 times with seq {sent[0]}, done after {waited:.1f} s with the first acceptance's ids"


@check("C74", "prompt_cache_hit_tokens grows on a repeated long prompt and ignores num_samples")
def c74_cache(target: Target) -> str:
    """Samples a new prompt three times, and a second one with 4 samples at once."""
    sampler = target.sampler().result(PATIENCE_S)

    def hits(tokens: list[int], count: int) -> int:
        return draw(sampler, target.prompt(tokens), count, max_tokens=1).prompt_cache_hit_tokens

    fresh, other = (target.tokens(_LONG, uuid.uuid4().int % 10**9) for _ in range(2))
    first, again, four = (hits(fresh, count) for count in (1, 1, 4))
    expect(0 <= first < again <= _LONG, f"{first} hits at first and {again} again, of {_LONG} tokens")
    expect(again >= _LONG // 2, f"only {again} of {_LONG} tokens of the same prompt came from the cache")
    expect(four == again, f"{four} hits with 4 samples, {again} with one")
    cold = hits(other, 4)
    expect(cold <= _LONG // 2, f"{cold} hits of a new prompt with 4 samples: the samples' own hits are counted")
    return f"{first}, then {again} of {_LONG}; the same with 4 samples; {cold} for a new prompt with 4"
