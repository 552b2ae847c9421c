"""Section D: the weights of a sampling client, and clients in several processes."""

import pickle
import time
from dataclasses import dataclass

import tinker
from tinker import types

from fovea_conformance.agreement import (
    MEAN_TOLERANCE,
    PATIENCE_S,
    apart,
    draw,
    expect_agree,
    expect_moved,
    outputs_of,
    prompt_scores,
)
from fovea_conformance.check import check, expect, may_refuse
from fovea_conformance.proxy import Exchange
from fovea_conformance.target import Target

_PROBES = 8
_BLOCK = 1_000_000_000


class Probes:
    """Texts, each of which a client scores once, because KV caches must not return scores of older weights."""

    def __init__(self, target: Target) -> None:
        self.texts = [target.tokens(13, seed) for seed in range(_PROBES)]
        self.data = [target.datum(12, seed) for seed in range(_PROBES)]

    def step(self, training: tinker.TrainingClient) -> None:
        """Submits one step."""
        training.forward_backward(self.data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))

    def forward(self, training: tinker.TrainingClient) -> "tinker.APIFuture[types.ForwardBackwardOutput]":
        """Submits the trainer's scoring of all texts."""
        return training.forward(self.data, "cross_entropy")

    def sampled(self, sampler: tinker.SamplingClient, number: int) -> list[float]:
        """Returns the sampler's scores of one text."""
        return prompt_scores(sampler, self.texts[number])


@check("C75", "save_weights_and_get_sampling_client: samples reflect the step just before, not later ones (snapshot)")
def c75_snapshot(target: Target) -> str:
    """Submits step, scores, save, step, scores and save without waiting.

    Each client must have the scores of its own moment.
    """
    training = target.training()
    probes = Probes(target)
    queued = []
    for _ in range(2):
        probes.step(training)
        queued.append((probes.forward(training), training.save_weights_and_get_sampling_client()))
    (first, second), (older, newer) = zip(*queued, strict=True)
    scores = [outputs_of(one.result(PATIENCE_S)) for one in (first, second)]
    clients = [one.result(PATIENCE_S) for one in (older, newer)]
    moved = expect_moved(scores[0][0], scores[1][0], "the trainer's scores before and after the second step")
    far = [
        expect_agree(probes.sampled(client, 0), wanted[0], f"the client saved after step {number}")
        for number, (client, wanted) in enumerate(zip(clients, scores, strict=True), 1)
    ]
    drawn = draw(clients[0], types.ModelInput.from_ints(probes.texts[1][:6]), temperature=1.0).sequences[0]
    again = prompt_scores(clients[0], probes.texts[1][:6] + drawn.tokens)[5:]
    expect_agree(drawn.logprobs or [], again, "tokens drawn from the first snapshot after the second step")
    return f"{max(far):.1e} from their own moment at most; the moments are {moved:.2f} nats apart"


@check("C76", "kind inflight: older client eventually sees newer weights, newer client never older ones")
def c76_inflight(target: Target) -> str:
    """Saves in flight twice, with a step between.

    Both clients score texts that no cache knows, until the older client has the new weights.
    """
    training = target.training()
    probes = Probes(target)
    probes.step(training)
    before = probes.forward(training)
    with may_refuse():
        older = training.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)
    wanted = outputs_of(before.result(PATIENCE_S))
    expect_agree(probes.sampled(older, 0), wanted[0], "the first client before the second save")
    probes.step(training)
    after = probes.forward(training)
    newer = training.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)
    scores = outputs_of(after.result(PATIENCE_S))
    moved = expect_moved(wanted[1], scores[1], "the trainer's scores before and after the second step")
    for number in range(1, 5):
        expect_agree(
            probes.sampled(newer, number), scores[number], "the newer client, which must not have older weights"
        )
    begun = time.monotonic()
    for number in range(1, _PROBES):
        seen = probes.sampled(older, number)
        if apart(seen, scores[number]) <= MEAN_TOLERANCE:
            return f"the newer at once, the older after {number} tries; the weights are {moved:.2f} nats apart"
        expect_agree(seen, wanted[number], "the older client, which has neither the old nor the new weights")
        time.sleep(number)
    expect(False, f"the older client still has the older weights after {time.monotonic() - begun:.0f} s")
    return ""


@check("C77", "Pickled client and sampler handle sample beside the original without id clashes, join flag off and on")
def c77_clones(target: Target) -> str:
    """Uses a pickled client, a client from a handle and the original at once. A proxy reads the ids of all requests."""
    return "; ".join(_clones(target, joins) for joins in (False, True))


def _clones(target: Target, joins: bool) -> str:
    proxy = target.proxy({"sample_join_sampling_session": joins})
    original = target.sampler(target.service(proxy)).result(PATIENCE_S)
    pickled: tinker.SamplingClient = pickle.loads(pickle.dumps(original))
    handle = original.get_sampler_handle()
    rebuilt = tinker.SamplingClient.from_sampler_handle(handle, api_key=target.options.api_key)
    given = types.SamplingParams(max_tokens=4, stop=[])
    pending = [
        client.sample(target.prompt(target.tokens(8, seed)), 2, given)
        for seed in range(3)
        for client in (original, pickled, rebuilt)
    ]
    answers = [one.result(PATIENCE_S) for one in pending]
    sent = [Sent.read(one) for one in proxy.of("asample")]
    for name, values in (
        ("seq ids", [one.seq_id for one in sent]),
        ("request ids", [one.request_id for one in sent]),
        ("sequence ids", [sequence.sequence_id for answer in answers for sequence in answer.sequences]),
    ):
        expect(len(values) == len(set(values)) and len(values) >= 9, f"join {joins}: {name} clash: {values}")
    blocks = {one.seq_id // _BLOCK for one in sent}
    expect(len(blocks) == 3 and 0 in blocks, f"join {joins}: the clients use the blocks {sorted(blocks)}")
    counters = [one.answer_json().get("client_counter") for one in proxy.of("join_sampling_session")]
    expect(sorted(counters) == (sorted(blocks - {0}) if joins else []), f"join {joins}: the server gave {counters}")
    return f"join {'on' if joins else 'off'}: 9 requests of 3 clients in blocks {sorted(blocks)}"


@dataclass(frozen=True)
class Sent:
    """An asample request and its response."""

    seq_id: int
    request_id: str

    @classmethod
    def read(cls, exchange: Exchange) -> "Sent":
        """Reads it from an exchange."""
        expect(exchange.status == 200, f"an asample was answered {exchange.status}: {exchange.answer[:200]!r}")
        return cls(exchange.json()["seq_id"], exchange.answer_json()["request_id"])
