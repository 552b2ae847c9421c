"""Section D: the ends of sequences."""

import tinker
from tinker import types

from fovea_conformance.agreement import PATIENCE_S, draw, greedy, outputs_of
from fovea_conformance.check import NotApplicable, check, expect
from fovea_conformance.target import Target

_OPEN = "My favourite word of all is"
_STARTS = [_OPEN, "The colours of the flag are", "Once there was a small boat", "I went to the market and bought"]
_SURE = -0.1  # log-probability of a token that was learnt


@check("C60", "Token stop: ends with that token once, stop_reason stop")
def c60_token(target: Target) -> str:
    """Stops greedy tokens at one of them. The result must be the same up to and including that token."""
    sampler = target.sampler().result(PATIENCE_S)
    prompt, tokens = _plain(target, sampler)
    at = max(position for position, token in enumerate(tokens) if token not in tokens[:position])
    for stop in ([tokens[at]], [_absent(target, tokens), tokens[at]]):
        sequence = draw(sampler, prompt, temperature=0.0, max_tokens=24, stop=stop).sequences[0]
        wanted = tokens[: at + 1]
        expect(sequence.tokens == wanted, f"stop {stop} gives {sequence.tokens}, expected {wanted}")
        expect(sequence.stop_reason == "stop", f"stop_reason {sequence.stop_reason!r}")
    return f"ends with token {tokens[at]}, the {at + 1}th, once"


def _plain(target: Target, sampler: tinker.SamplingClient) -> tuple[types.ModelInput, list[int]]:
    """Returns a prompt, and its greedy tokens before the first special one, such as EOS, which would stop by itself."""
    special = set(target.tokenizer.all_special_ids)
    found = []
    for start in _STARTS:
        prompt = target.prompt(start)
        tokens = greedy(sampler, prompt, 24)
        end = next((at for at, token in enumerate(tokens) if token in special), len(tokens))
        found.append((prompt, tokens[:end]))
    longest = max(found, key=lambda one: len(one[1]))
    if not longest[1]:
        raise NotApplicable("the model's greedy text begins with a special token, whatever the prompt")
    return longest


def _absent(target: Target, tokens: list[int]) -> int:
    return next(one for one in target.tokens(40) if one not in tokens)


@check("C61", "String stop as bare string and as list: decoded text contains it once at the end")
def c61_string(target: Target) -> str:
    """Stops greedy text at its own words, one of which crosses the border of two tokens."""
    sampler = target.sampler().result(PATIENCE_S)
    prompt, tokens = _plain(target, sampler)
    chosen = _strings(target, tokens)
    if not chosen:
        raise NotApplicable("the model's greedy text has no readable part to stop at")
    decode = target.tokenizer.decode
    for text in chosen:
        for stop in (text, [text], ["\u2603 never \u2603", text]):
            sequence = draw(sampler, prompt, temperature=0.0, max_tokens=24, stop=stop).sequences[0]
            seen = decode(sequence.tokens)
            expect(
                sequence.stop_reason == "stop", f"stop {stop!r}: stop_reason {sequence.stop_reason!r} after {seen!r}"
            )
            expect(seen.count(text) == 1, f"stop {stop!r}: the text has it {seen.count(text)} times: {seen!r}")
            expect(text not in decode(sequence.tokens[:-1]), f"stop {stop!r}: a token too many: {seen!r}")
            expect(sequence.tokens == tokens[: len(sequence.tokens)], f"stop {stop!r} changes the tokens before it")
    return f"stopped at {', '.join(repr(text) for text in chosen)}, bare and in lists"


def _strings(target: Target, tokens: list[int]) -> list[str]:
    """Returns a part of one token's text, and a text across the border of two, neither of which occurs earlier."""
    tokenizer = target.tokenizer
    within, over = "", ""
    for at in range(2, len(tokens)):
        before, one, two = (
            tokenizer.decode(tokens[start : start + size]) for start, size in ((0, at), (at, 1), (at, 2))
        )
        plain = one.isprintable() and len(one.strip()) >= 2
        if plain and not within and one.strip() not in before:
            within = one.strip()
        pair = one[-1:] + two[len(one) :][:2]
        if plain and not over and len(pair) > 1 and pair.isprintable() and "\ufffd" not in pair and two.startswith(one):
            over = pair if pair not in before + one and pair in two else ""
    return [text for text in (within, over) if text and "\ufffd" not in text]


@check("C62", "stop absent: ends at EOS, EOS included; stop [] runs through EOS to max_tokens")
def c62_eos(target: Target) -> str:
    """Trains a model to say EOS next, and samples it greedily with stop missing, [] and a string."""
    eos = target.tokenizer.eos_token_id
    if eos is None:
        raise NotApplicable("the model's tokenizer has no end-of-sequence token")
    training = target.training()
    prompt = target.encode(_OPEN)
    sampler = _taught(training, prompt, eos)
    ended = draw(sampler, target.prompt(prompt), temperature=0.0, stop=None).sequences[0]
    expect(ended.tokens[-1:] == [eos], f"stop absent: {ended.tokens} does not end with EOS {eos}")
    expect(ended.tokens.count(eos) == 1 and ended.stop_reason == "stop", f"{ended.tokens}, {ended.stop_reason!r}")
    through = draw(sampler, target.prompt(prompt), temperature=0.0, stop=[]).sequences[0]
    expect(len(through.tokens) == 12 and through.stop_reason == "length", f"stop []: {through.tokens}")
    expect(eos in through.tokens[:-1], f"stop []: EOS {eos} is not among {through.tokens}")
    string = draw(sampler, target.prompt(prompt), temperature=0.0, stop=["\u2603 never \u2603"]).sequences[0]
    expect(string.tokens == ended.tokens, f"with a string stop EOS must still end: {string.tokens}")
    return f"absent: {len(ended.tokens)} tokens, the last EOS; []: 12 tokens through EOS"


def _taught(training: tinker.TrainingClient, prompt: list[int], token: int) -> tinker.SamplingClient:
    """Returns a sampler with weights that continue the prompt with the token."""
    weights = [0.0] * (len(prompt) - 1) + [1.0]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(prompt),
        loss_fn_inputs={
            "target_tokens": types.TensorData([*prompt[1:], token], "int64"),
            "weights": types.TensorData(weights, "float32"),
        },
    )
    for _ in range(40):
        backward = training.forward_backward([datum], "cross_entropy")
        taken = training.optim_step(types.AdamParams(learning_rate=1e-2))
        score = outputs_of(backward.result(PATIENCE_S))[0][-1]
        taken.result(PATIENCE_S)
        if score > _SURE:
            return training.save_weights_and_get_sampling_client().result(PATIENCE_S)
    raise NotApplicable(f"40 steps did not teach the model to say EOS: its log-probability is {score:.2f}")


@check("C63", "max_tokens reached gives stop_reason length")
def c63_length(target: Target) -> str:
    """Samples one and five tokens, with stops that do not occur."""
    sampler = target.sampler().result(PATIENCE_S)
    for count in (1, 5):
        for sequence in draw(sampler, target.prompt(_OPEN), 2, max_tokens=count).sequences:
            expect(len(sequence.tokens) == count, f"{len(sequence.tokens)} tokens for max_tokens {count}")
            expect(sequence.stop_reason == "length", f"stop_reason {sequence.stop_reason!r}")
    return "1 and 5 tokens, twice each"
