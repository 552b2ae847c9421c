"""Section I: several base models behind one server, such as a teacher and its student."""

import tinker
from tinker import types

from fovea_conformance.check import Failed, NotApplicable, check, expect
from fovea_conformance.target import Target


def _named(target: Target, flag: str, value: bool) -> list[str]:
    """Returns the models for which a flag of the capabilities has a value. A missing flag counts as true."""
    listed = target.http.get("get_server_capabilities").raise_for_status().json()["supported_models"]
    return [str(one["model_name"]) for one in listed if one.get(flag, True) is value]


@check("C120", "Of several base models, each that is listed as sampleable samples and scores by its own name")
def c120_each_samples(target: Target) -> str:
    """Creates a sampling client of each model, and checks its model, four tokens and the score of a prompt."""
    names = _named(target, "sampleable", True)
    if len(names) < 2:
        raise NotApplicable(f"needs a second base model; sampleable are {names}")
    service, tokens = target.service(), target.tokens(8)
    scores = {}
    for name in names:
        sampling = service.create_sampling_client(base_model=name).result(60)
        said = sampling.get_base_model()
        expect(said == name, f"the client of {name} says that it samples from {said}")
        params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
        drawn = sampling.sample(types.ModelInput.from_ints(tokens), 1, params).result(60).sequences[0].tokens
        expect(0 < len(drawn) <= 4, f"{name} drew {len(drawn)} tokens of 4")
        found = sampling.compute_logprobs(types.ModelInput.from_ints(tokens)).result(60)
        expect(len(found) == len(tokens), f"{name} scored {len(found)} of {len(tokens)} tokens")
        scores[name] = tuple(found)
    expect(len(set(scores.values())) == len(names), f"two of {names} score a prompt alike: they are one model")
    return f"{len(names)} models, each of its own weights"


@check("C121", "A base model that is listed as not trainable is refused as user error, and goes on being sampled")
def c121_sampling_only(target: Target) -> str:
    """Calls create_model of such a model through the SDK, and then samples it."""
    names = _named(target, "trainable", False)
    if not names:
        raise NotApplicable("needs a base model that is for sampling only")
    service = target.service()
    for name in names:
        try:
            service.create_lora_training_client(base_model=name, rank=8).result(60)
        except (tinker.BadRequestError, tinker.RequestFailedError) as error:
            expect(name in str(error), f"the refusal does not name {name}: {error}")
        else:
            raise Failed(f"{name} is listed as not trainable, but a training client was created for it")
        sampling = service.create_sampling_client(base_model=name).result(60)
        sampling.sample(target.prompt(), 1, types.SamplingParams(max_tokens=1)).result(60)
    return f"{names} refused with their names, and sampled"
