"""Section C: identity: ids that clients predict, and repeated requests."""

from typing import Any

import numpy as np
from tinker import types

from fovea_conformance.check import check, expect
from fovea_conformance.checks.sequencing import logprobs_of
from fovea_conformance.target import Target, unique_name

_STEP = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
_SAME = 1e-4
_MOVED = 1e-2


@check("C36", "Model ids equal <session>:train:<n> for create_model and for load form A")
def c36_model_ids(target: Target) -> str:
    """Creates two models with create_model and one from a saved state. Reads the raw result of each load too."""
    proxy = target.proxy()
    service = target.service(proxy)
    session_id = service.holder.get_session_id()
    created = [target.training(service) for _ in range(2)]
    path = created[0].save_state(unique_name("c36")).result(60).path
    loaded = service.create_training_client_from_state(path).result(60)
    found = [str(one.model_id) for one in (*created, loaded)]
    wanted = [f"{session_id}:train:{number}" for number in range(3)]
    expect(found == wanted, f"the SDK's models are {found}, expected {wanted}")
    answers = [*proxy.of("create_model"), *proxy.of("load_weights")]
    results = [target.collect(one.answer_json()["request_id"]) for one in answers]
    said = [one.get("model_id") for one in results]
    expect(said[:2] == wanted[:2], f"create_model answered {said[:2]}, the SDK foresees {wanted[:2]}")
    expect(said[2] in (wanted[2], None), f"load_weights answered {said[2]}, the SDK foresees {wanted[2]}")
    info = target.post("get_info", model_id=wanted[2], type="get_info").raise_for_status().json()
    expect(info["model_id"] == wanted[2], f"get_info of {wanted[2]} is of {info['model_id']}")
    return ", ".join(found)


@check("C40", "Repeated (model_id, seq_id) returns the same request_id and is not executed twice")
def c40_repeats(target: Target) -> str:
    """Sends losses and a step three times.

    The weights must be those of a model that got them once; a doubled loss must differ.
    """
    session_id = target.session()
    once, thrice, doubled = (target.raw_model(session_id, number) for number in range(3))
    after = _train(target, once, 1)
    repeated = _train(target, thrice, 3)
    gap = float(np.abs(after - repeated).max())
    expect(gap < _SAME, f"repeats changed the weights: log-probabilities differ by {gap:.2g}")
    reach = float(np.abs(after - _train_doubled(target, doubled)).max())
    expect(reach > _MOVED, f"a loss executed twice would move log-probabilities by {reach:.2g} only: nothing is proved")
    return f"3 requests sent 3 times: same ids, log-probabilities differ by {gap:.1g}; executed twice, by {reach:.2g}"


@check("C41", "An ephemeral sampler save resent with a higher sampling_session_seq_id is the same request")
def c41_resent_save(target: Target) -> str:
    """Sends the same seq_id with numbers 0, 1 and 5.

    There must be one request_id and one sampling session, which samples.
    """
    model_id = target.raw_model(target.session())
    body = {"model_id": model_id, "seq_id": 1, "kind": "snapshot", "type": "save_weights_for_sampler"}
    ids = [target.submit("save_weights_for_sampler", sampling_session_seq_id=number, **body) for number in (0, 1, 5)]
    expect(len(set(ids)) == 1, f"resent with a higher number, the save got the request_ids {ids}")
    result = target.collect(ids[0])
    sampler_id = result.get("sampling_session_id")
    expect(isinstance(sampler_id, str), f"the save ended with {str(result)[:200]}")
    sampled = target.collect(target.submit_sample(str(sampler_id), 0)["request_id"])
    expect("error" not in sampled, f"the sampling session {sampler_id} does not sample: {str(sampled)[:200]}")
    following = target.submit_loss(model_id, 2, forward_only=True)
    loss = target.output(following).metrics["loss:sum"]
    return f"one request_id, session {sampler_id} samples, the next request ran (loss {loss:.3f})"


@check("C46", "create_model repeated with the same (session, model_seq_id) yields one model")
def c46_one_model(target: Target) -> str:
    """Sends three requests, one of them after the model exists.

    There must be one request_id, and one run in the session's list.
    """
    session_id = target.session()
    lora = {"rank": 8, "seed": 7, "train_unembed": True, "train_mlp": True, "train_attn": True}
    body: dict[str, Any] = {
        "session_id": session_id, "model_seq_id": 0, "base_model": target.model, "lora_config": lora,
        "type": "create_model",
    }  # fmt: skip
    ids = [target.submit("create_model", **body) for _ in range(2)]
    model_id = target.collect(ids[0]).get("model_id")
    ids.append(target.submit("create_model", **body))
    expect(len(set(ids)) == 1, f"three times the same create_model got the request_ids {ids}")
    runs = target.http.get(f"sessions/{session_id}").raise_for_status().json()["training_run_ids"]
    expect(runs == [model_id], f"the session has the runs {runs}, expected {model_id} alone")
    return f"one request_id, one run: {model_id}"


@check("C47", "asample repeated with the same (session, seq_id) yields the same request_id and sequence ids")
def c47_repeated_sample(target: Target) -> str:
    """Submits a sample three times, once after its end. Another seq_id and another session must get other ids."""
    session_id = target.session()
    sampler_id, other_id = target.sampling_session(session_id, 0), target.sampling_session(session_id, 1)
    answers = [target.submit_sample(sampler_id, 3, num_samples=3) for _ in range(2)]
    before = target.poll(answers[0]["request_id"]).content
    answers.append(target.submit_sample(sampler_id, 3, num_samples=3))
    ids = [one["request_id"] for one in answers]
    sequences = [one["sample_sequence_ids"] for one in answers]
    expect(len(set(ids)) == 1, f"the repeated asample got the request_ids {ids}")
    expect(sequences[0] == sequences[1] == sequences[2], f"the repeated asample got the sequence ids {sequences}")
    expect(len(set(sequences[0])) == 3, f"3 samples have the ids {sequences[0]}")
    expect(target.poll(ids[0]).content == before, "the repeat after the end changed the result")
    others = [target.submit_sample(sampler_id, 4), target.submit_sample(other_id, 3)]
    fresh = {ids[0], *(one["request_id"] for one in others)}
    expect(len(fresh) == 3, f"another seq_id, and another session, must get other ids: {fresh}")
    shared = set(sequences[0]) & {name for one in others for name in one["sample_sequence_ids"]}
    expect(not shared, f"sequence ids were given twice: {shared}")
    return f"{ids[0]} three times, with the ids of its {len(sequences[0])} sequences"


@check("C48", "asample seq ids near 10^18 are accepted")
def c48_large_ids(target: Target) -> str:
    """Sends the ids of a clone with the highest number, and the largest int64. Each must be sampled."""
    sampler_id = target.sampling_session(target.session())
    seq_ids = [10**18 - 1, 10**18, 10**18 + 10**9 - 1, 2**63 - 1]
    answers = [target.submit_sample(sampler_id, seq_id) for seq_id in seq_ids]
    expect(len({one["request_id"] for one in answers}) == len(seq_ids), f"ids collide: {answers}")
    for seq_id, one in zip(seq_ids, answers, strict=True):
        result = target.collect(one["request_id"])
        expect("error" not in result, f"seq_id {seq_id} failed: {str(result)[:200]}")
    return f"{len(seq_ids)} ids up to 2^63 - 1 sampled"


def _train(target: Target, model_id: str, times: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Sends two losses and a step, each several times; returns the log-probabilities afterwards."""
    step = {"model_id": model_id, "seq_id": 3, "adam_params": _STEP, "type": "optim_step"}
    heavy, light = _data(target)
    sent = [
        [target.submit_loss(model_id, 1, [heavy]) for _ in range(times)],
        [target.submit_loss(model_id, 2, [light]) for _ in range(times)],
        [target.submit("optim_step", **step) for _ in range(times)],
    ]
    for ids in sent:
        target.collect(ids[0])
    sent[0] += [target.submit_loss(model_id, 1, [heavy]) for _ in range(times - 1)]
    sent[2] += [target.submit("optim_step", **step) for _ in range(times - 1)]
    wrong = [ids for ids in sent if len(set(ids)) != 1]
    expect(not wrong, f"repeated (model_id, seq_id) got several request_ids: {wrong}")
    return logprobs_of(target.output(target.submit_loss(model_id, 4, [heavy, light], forward_only=True)))


def _train_doubled(target: Target, model_id: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Does the same with a first loss that is really computed twice."""
    heavy, light = _data(target)
    for seq_id, datum in enumerate((heavy, heavy, light), start=1):
        target.submit_loss(model_id, seq_id, [datum])
    target.submit("optim_step", model_id=model_id, seq_id=4, adam_params=_STEP, type="optim_step")
    return logprobs_of(target.output(target.submit_loss(model_id, 5, [heavy, light], forward_only=True)))


def _data(target: Target) -> tuple[types.Datum, types.Datum]:
    """Returns two datums that move the weights in opposite directions, so that doubling one changes the step."""
    negative = types.TensorData.from_numpy(np.full(12, -1.5, np.float32))
    return target.datum(seed=1), target.datum(seed=2, weights=negative)
