"""Section D: the model that is sampled, how tokens are drawn, and the meaning of their log-probabilities."""

import math

import tinker
from tinker import types

from fovea_conformance.agreement import (
    MAX_TOLERANCE,
    PATIENCE_S,
    draw,
    expect_agree,
    expect_moved,
    forward_scores,
    greedy,
    log_sum,
    logprobs_of,
    prompt_scores,
    scored,
    train,
)
from fovea_conformance.check import NotApplicable, check, expect
from fovea_conformance.target import Target, unique_name

_OPEN = "My favourite word of all is"
_TOP = 20
# Two tokens this close may change places between two kernels.
_TIE = 0.05
# Two sequences with a lower log-probability are never equal by chance.
_BY_CHANCE = -15.0


def _saved(target: Target, training: tinker.TrainingClient, stem: str) -> str:
    train(training, [target.datum()])
    path: str = training.save_weights_for_sampler(unique_name(stem)).result(PATIENCE_S).path
    return path


def _expect_tuned(target: Target, training: tinker.TrainingClient, tuned: tinker.SamplingClient) -> float:
    datum, tokens = target.datum(), target.tokens(13)
    return expect_agree(prompt_scores(tuned, tokens), forward_scores(training, [datum])[0], "the fine-tuned weights")


@check("C51", "Sampling works with base_model only; fine-tuned with model_path only (GET samplers gives base_model)")
def c51_who(target: Target) -> str:
    """Reads the SDK's requests, and compares the fine-tuned client's scores with the trainer's."""
    proxy = target.proxy()
    service = target.service(proxy)
    training = target.training(service)
    path = _saved(target, training, "c51")
    base = service.create_sampling_client(base_model=target.model).result(PATIENCE_S)
    tuned = service.create_sampling_client(model_path=path).result(PATIENCE_S)
    opened = [
        (one.json().get("base_model"), one.json().get("model_path")) for one in proxy.of("create_sampling_session")
    ]
    expect(opened == [(target.model, None), (None, path)], f"the sessions were opened with {opened}")
    asked = [one.answer_json() for one in proxy.exchanges if one.route.startswith("samplers/")]
    expect(len(asked) == 1, f"GET samplers was asked {len(asked)} times")
    expect(asked[0].get("base_model") == target.model, f"GET samplers says {asked[0]}")
    expect(asked[0].get("model_path") == path, f"GET samplers says {asked[0]}, expected the path {path}")
    for client in (base, tuned):
        expect(len(draw(client, target.prompt(), max_tokens=4).sequences[0].tokens) == 4, "a sample has not 4 tokens")
    tokens = target.tokens(13)
    moved = expect_moved(prompt_scores(base, tokens), prompt_scores(tuned, tokens), "base and fine-tuned weights")
    agreed = _expect_tuned(target, training, tuned)
    return f"base and tuned are {moved:.2f} nats apart; tuned and trainer {agreed:.1e} at most"


@check("C52", "Both base_model and model_path are accepted together")
def c52_both(target: Target) -> str:
    """Creates a client with both arguments. Its scores must be the trainer's, so it must have the saved weights."""
    proxy = target.proxy()
    service = target.service(proxy)
    training = target.training(service)
    path = _saved(target, training, "c52")
    both = service.create_sampling_client(base_model=target.model, model_path=path).result(PATIENCE_S)
    body = next(iter(proxy.of("create_sampling_session"))).json()
    expect(body.get("base_model") == target.model and body.get("model_path") == path, f"the SDK sent {body}")
    base = target.sampler(service).result(PATIENCE_S)
    tokens = target.tokens(13)
    expect_moved(prompt_scores(base, tokens), prompt_scores(both, tokens), "base weights and the client made with both")
    return f"has the saved weights, {_expect_tuned(target, training, both):.1e} nats from the trainer at most"


@check("C53", "sample_sequence_ids has num_samples unique ids; SDK sequences carry them")
def c53_ids(target: Target) -> str:
    """Sends three requests of 4, 1 and 4 samples.

    The ids of the submissions must be different, and must come back in order.
    """
    proxy = target.proxy()
    sampler = target.sampler(target.service(proxy)).result(PATIENCE_S)
    answers = [draw(sampler, target.prompt(), count, max_tokens=2) for count in (4, 1, 4)]
    given = [one.answer_json().get("sample_sequence_ids") for one in proxy.of("asample")]
    expect([len(ids or []) for ids in given] == [4, 1, 4], f"ids for 4, 1 and 4 samples: {given}")
    every = [one for ids in given for one in ids]
    expect(all(isinstance(one, str) and one for one in every), f"ids must be texts: {every}")
    expect(len(set(every)) == 9, f"ids repeat: {every}")
    carried = [[sequence.sequence_id for sequence in answer.sequences] for answer in answers]
    expect(carried == given, f"the sequences carry {carried}, the submissions answered {given}")
    return f"9 ids, such as {every[0]}"


@check("C54", "num_samples 8 gives 8 sequences, different at temperature 1")
def c54_eight(target: Target) -> str:
    """Samples sequences of 32 tokens, so improbable that two cannot be equal by chance."""
    sampler = target.sampler().result(PATIENCE_S)
    answer = draw(sampler, target.prompt(_OPEN), 8, max_tokens=32, temperature=1.0)
    expect(len(answer.sequences) == 8, f"{len(answer.sequences)} sequences for num_samples 8")
    likeliest = max(sum(logprobs_of(one)) for one in answer.sequences)
    different = len({tuple(one.tokens) for one in answer.sequences})
    if different < 8 and likeliest > _BY_CHANCE:
        raise NotApplicable(f"the model is too sure of itself: a sample had the log-probability {likeliest:.1f}")
    expect(different == 8, f"{different} of 8 are different; the likeliest has the log-probability {likeliest:.1f}")
    return f"8 different; the likeliest has the log-probability {likeliest:.1f}"


@check("C55", "Sampled logprobs present, as many as tokens, <= 0")
def c55_logprobs(target: Target) -> str:
    """Samples at temperatures 0, 0.5 and 1. At 1 the log-probabilities must equal those of compute_logprobs."""
    sampler = target.sampler().result(PATIENCE_S)
    for temperature in (0.0, 0.5, 1.0):
        answer = draw(sampler, target.prompt(_OPEN), 2, temperature=temperature)
        for sequence in answer.sequences:
            wrong = [one for one in logprobs_of(sequence) if not -math.inf < one <= 0]
            expect(not wrong, f"temperature {temperature}: log-probabilities {wrong}")
    prompt = target.encode(_OPEN)
    whole = prompt_scores(sampler, prompt + sequence.tokens)[len(prompt) - 1 :]
    far = expect_agree(logprobs_of(sequence), whole, "sampled and scored log-probabilities at temperature 1")
    return f"finite and <= 0 at T 0, 0.5 and 1; {far:.1e} from compute_logprobs at T 1"


@check("C56", "Temperature-scaled sampled logprobs pass the cookbook validator at T 0.5 and 1.5")
def c56_temperature(target: Target) -> str:
    """Samples 16 first tokens at temperature T.

    The difference of each score to the score at T = 1 divided by T must be one number, minus the log of the sum.
    """
    sampler = target.sampler().result(PATIENCE_S)
    prompt = target.encode(_OPEN)
    seen = []
    for temperature in (0.5, 1.5):
        answer = draw(sampler, target.prompt(prompt), 16, max_tokens=1, temperature=temperature)
        drawn = {one.tokens[0]: logprobs_of(one)[0] for one in answer.sequences}
        raw = {token: prompt_scores(sampler, [*prompt, token])[-1] for token in drawn}
        offsets = {token: drawn[token] - raw[token] / temperature for token in drawn}
        spread = max(offsets.values()) - min(offsets.values())
        expect(
            spread <= MAX_TOLERANCE,
            f"T {temperature}: differences do not scale with 1/T, the offset varies by {spread:.3f} over"
            f" {len(drawn)} tokens",
        )
        low, high = _offset_bounds(sampler, prompt, temperature)
        offset = sum(offsets.values()) / len(offsets)
        expect(
            low - MAX_TOLERANCE <= offset <= high + MAX_TOLERANCE,
            f"T {temperature}: not normalised, the offset is {offset:.3f} and must lie in {low:.3f} to {high:.3f}",
        )
        seen.append(f"T {temperature}: {len(drawn)} tokens, spread {spread:.1e}")
    return "; ".join(seen)


def _offset_bounds(sampler: tinker.SamplingClient, prompt: list[int], temperature: float) -> tuple[float, float]:
    """Returns bounds of -log(sum_i p_i^(1/T)) from the likeliest tokens; for T < 1 on both sides."""
    given = types.SamplingParams(max_tokens=1, temperature=1.0)
    model_input = types.ModelInput.from_ints([*prompt, prompt[0]])
    answer = sampler.sample(model_input, 1, given, True, topk_prompt_logprobs=_TOP).result(PATIENCE_S)
    row = [logprob for _, logprob in (answer.topk_prompt_logprobs or [None])[-1] or []]
    expect(len(row) == _TOP, f"{len(row)} alternatives, expected {_TOP}")
    top = log_sum([one / temperature for one in row])
    if temperature >= 1:
        return -math.inf, -top
    rest = max(1 - math.exp(log_sum(row)), 1e-9)
    return -log_sum([top, math.log(rest) + min(row) * (1 / temperature - 1)]), -top


@check("C57", "temperature 0 equals argmax of compute_logprobs scoring")
def c57_greedy(target: Target) -> str:
    """Scores the greedy tokens with 2 alternatives per position. Each must be the first, or as likely within a tie."""
    sampler = target.sampler().result(PATIENCE_S)
    prompt = target.encode(_OPEN)
    tokens = greedy(sampler, target.prompt(prompt))
    given = types.SamplingParams(max_tokens=1)
    answer = sampler.sample(target.prompt(prompt + tokens), 1, given, True, topk_prompt_logprobs=2).result(PATIENCE_S)
    scores = scored(answer.prompt_logprobs)[len(prompt) - 1 :]
    rows = (answer.topk_prompt_logprobs or [])[len(prompt) :]
    expect(len(rows) == len(tokens), f"{len(rows)} rows of alternatives for {len(tokens)} tokens")
    best = [row[0] if row else (-1, 0.0) for row in rows]
    behind = [top - score for (_, top), score in zip(best, scores, strict=True)]
    expect(max(behind) <= _TIE, f"greedy tokens are up to {max(behind):.3f} nats less likely than the most likely")
    equal = sum(token == first for token, (first, _) in zip(tokens, best, strict=True))
    return f"{equal} of {len(tokens)} greedy tokens are the first alternative, the rest ties"


@check("C58", "Same seed and parameters reproduce; seeds differ across the num_samples of one request")
def c58_seed(target: Target) -> str:
    """Draws four samples by seed, twice with the same seed and once with another."""
    sampler = target.sampler().result(PATIENCE_S)
    first, again, other = (
        [one.tokens for one in draw(sampler, target.prompt(_OPEN), 4, max_tokens=16, seed=seed).sequences]
        for seed in (11, 11, 2**40 + 5)
    )
    same = sum(one == two for one, two in zip(first, again, strict=True))
    expect(same == 4, f"{same} of 4 sequences are the same for the same seed")
    expect(len({tuple(one) for one in first}) == 4, "the samples of one seeded request repeat each other")
    expect(first != other, "another seed draws the same")
    return "4 of 4 reproduced, all 4 different, another seed differs"


@check("C59", "top_k 1 equals greedy; top_p tiny equals greedy")
def c59_narrow(target: Target) -> str:
    """Cuts twelve tokens at temperature 1 to the likeliest, and compares them with temperature 0."""
    sampler = target.sampler().result(PATIENCE_S)
    prompt = target.prompt(_OPEN)
    wanted = greedy(sampler, prompt)
    cuts: dict[str, dict[str, object]] = {"top_k 1": {"top_k": 1}, "top_p 1e-4": {"top_p": 1e-4}}
    for name, cut in cuts.items():
        for one in draw(sampler, prompt, 2, temperature=1.0, **cut).sequences:
            expect(one.tokens == wanted, f"{name} draws {one.tokens}, greedy is {wanted}")
    return f"2 samples of {len(wanted)} tokens each"
