"""Faults of a server with samples: changed protobuf answers, JSON requests and JSON answers."""

import json
from typing import Any

import numpy as np
from starlette.responses import Response

from fovea_conformance.proxy import Exchange
from tests.e2e.conformance.corruption import Wrong, floats


def repeat_first(message: Any) -> None:
    for one in message.sequences[1:]:
        one.CopyFrom(message.sequences[0])


def drop_last_token(message: Any) -> None:
    for one in message.sequences:
        if one.stop_reason == 0:
            one.tokens, one.logprobs = one.tokens[:-4], one.logprobs[:-4]


def drop_last_logprob(message: Any) -> None:
    for one in message.sequences:
        one.logprobs = one.logprobs[:-4]


def flip_reason(message: Any) -> None:
    for one in message.sequences:
        one.stop_reason = 1 - one.stop_reason


def shift_prompt(message: Any) -> None:
    if message.HasField("prompt_logprobs"):
        scores = floats(message.prompt_logprobs)
        scores[1:] = np.roll(scores[1:], 1)
        message.prompt_logprobs = scores.tobytes()


def score_first(message: Any) -> None:
    if message.HasField("prompt_logprobs"):
        scores = floats(message.prompt_logprobs)
        scores[0] = 0
        message.prompt_logprobs = scores.tobytes()


def scale_sampled(message: Any) -> None:
    for one in message.sequences:
        one.logprobs = (2 * floats(one.logprobs)).tobytes()


def ascend(message: Any) -> None:
    top = message.topk_prompt_logprobs
    if top.k:
        top.token_ids = np.frombuffer(top.token_ids, np.int32).reshape(-1, top.k)[:, ::-1].tobytes()
        top.logprobs = floats(top.logprobs).reshape(-1, top.k)[:, ::-1].tobytes()


def fewer_rows(message: Any) -> None:
    for one in message.sequences:
        top = one.topk_sampled_logprobs
        if top.k:
            top.length -= 1
            top.token_ids, top.logprobs = top.token_ids[: -4 * top.k], top.logprobs[: -4 * top.k]


def roll_targets(message: Any) -> None:
    tensor = message.target_prompt_logprobs
    if tensor.dense:
        tensor.dense = np.roll(floats(tensor.dense).reshape(tensor.shape), 1, axis=0).tobytes()


def move_columns(message: Any) -> None:
    csr = message.target_prompt_logprobs.sparse_csr
    if csr.col_indices:
        csr.col_indices = np.zeros_like(np.frombuffer(csr.col_indices, np.int64)).tobytes()


def scale_drawn(message: Any) -> None:
    tensor = message.prompt_alt_tokens.logprobs
    if tensor.dense:
        tensor.dense = (floats(tensor.dense) * 0.5).tobytes()


def count_hits_by_sample(message: Any) -> None:
    message.prompt_cache_hit_tokens *= len(message.sequences)


def double_loss(message: Any) -> None:
    message.metrics["loss:sum"] *= 2


def forget_expected(body: dict[str, Any]) -> None:
    for chunk in body["prompt"]["chunks"]:
        chunk.pop("expected_tokens", None)


def only_text(body: dict[str, Any]) -> None:
    chunks = body["prompt"]["chunks"]
    body["prompt"]["chunks"] = [chunk for chunk in chunks if chunk["type"] == "encoded_text"]


class FirstImage:
    """Replaces each image by the first one with as many tokens, as a cache with a bad key does."""

    def __init__(self) -> None:
        self.first: dict[object, str] = {}

    def __call__(self, body: dict[str, Any]) -> None:
        for chunk in body["prompt"]["chunks"]:
            if chunk["type"] == "image":
                chunk["data"] = self.first.setdefault(chunk.get("expected_tokens"), chunk["data"])


def same_ids(body: dict[str, Any]) -> None:
    body["sample_sequence_ids"] = [body["sample_sequence_ids"][0]] * len(body["sample_sequence_ids"])


def no_tokens(body: dict[str, Any]) -> None:
    body["sampling_params"]["max_tokens"] = -5


def another_base_model(body: dict[str, Any]) -> None:
    body["base_model"] = "another"


def one_counter(body: dict[str, Any]) -> None:
    body["client_counter"] = 1


class NewSequence:
    """A server that treats each asample as a new one."""

    def __init__(self) -> None:
        self.sent = 0

    def __call__(self, body: dict[str, Any]) -> None:
        self.sent += 1
        body["seq_id"] += 1000 * self.sent


class Sessions:
    """A server that samples all sessions with the weights of the first, or last, session that a save opened. With
    `snapshots` it treats kind inflight as snapshot.
    """

    def __init__(self, pick: int, snapshots: bool = False) -> None:
        self.pick, self.snapshots, self.saved = pick, snapshots, list[str]()

    def wrong(self) -> Wrong:
        return Wrong(self.before, self.after)

    def after(self, one: Exchange) -> Response | None:
        if one.route == "client/config":
            # A poller of one session would wait for samples of another.
            return Response(
                json.dumps(one.answer_json() | {"sample_use_retrieve_futures": False}), media_type="application/json"
            )
        body = one.answer_json() if one.route == "retrieve_future" and one.answer.startswith(b"{") else {}
        if "sampling_session_id" in body and body["sampling_session_id"] not in self.saved:
            self.saved.append(body["sampling_session_id"])
        return None

    def before(self, one: Exchange) -> Response | None:
        if one.route == "save_weights_for_sampler" and self.snapshots:
            one.body = json.dumps(one.json() | {"kind": "snapshot"}).encode()
        if one.route == "asample":
            body = one.json()
            body["seq_id"] += 7000 + self.saved.index(body["sampling_session_id"]) * 100_000
            body["sampling_session_id"] = self.saved[self.pick]
            one.body = json.dumps(body).encode()
        return None
