"""A valid body for every REST route that has one."""

import itertools
from typing import Any

from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import GRAPH

ROUTES = (
    "create_session", "session_heartbeat", "sessions/sess-none/finish", "create_model", "get_info", "optim_step",
    "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "load_weights?a",
    "copy_weights", "weights_info", "checkpoints/search", "sessions/search", "external_weights_upload_start",
    "external_weights_upload_finish", "create_custom_loss", "create_sampling_session",
    "join_sampling_session", "asample",
    "asample?empty",     "retrieve_future", "retrieve_futures", "cancel_future",
)  # fmt: skip


class Bodies:
    """Builds valid bodies. Numbers that a route uses up are new in each body.

    Args:
        session_id: An open session.
        model_id: A model of the session.
        sampling_id: A sampling session of the session.
    """

    def __init__(self, session_id: str, model_id: str, sampling_id: str) -> None:
        self.session_id, self.model_id, self.sampling_id = session_id, model_id, sampling_id
        self._numbers = itertools.count(1)

    def of(self, route: str) -> dict[str, Any]:
        """Returns the body of a route."""
        number = next(self._numbers)
        command = {"model_id": self.model_id, "seq_id": number}
        lora = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
        made = {"session_id": self.session_id, "model_seq_id": number}
        bodies: dict[str, dict[str, Any]] = {
            "create_session": {"tags": ["a"], "user_metadata": {"a": {"b": 1}}, "sdk_version": "1", "project_id": None,
                               "display_name": "n"},
            "session_heartbeat": {"session_id": self.session_id},
            "sessions/sess-none/finish": {"reason": {"type": "success"}, "detail": "d"},
            "create_model": made | {"base_model": MODEL, "user_metadata": {"a": "b"}, "lora_config": lora,
                                    "optimizer_config": {"type": "adamw"}},
            "get_info": {"model_id": self.model_id},
            "optim_step": command | {"adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12,
                                                     "weight_decay": 0.0, "grad_clip_norm": 0.0}},
            "save_weights": command | {"path": f"a{number}", "ttl_seconds": 7200, "overwrite": False,
                                       "user_metadata": {"a": "b"}},
            "save_weights_for_sampler": command | {"sampling_session_seq_id": number, "kind": "snapshot",
                                                   "ttl_seconds": 7200, "user_metadata": {"a": "b"}, "path": None},
            "save_weights_external": command | {"path": f"a{number}", "ttl_seconds": 7200,
                                                "age_encryption_recipients": None},
            "load_weights": command | {"path": f"tinker://{self.model_id}/weights/a", "optimizer": True,
                                       "base_model": MODEL, "user_metadata": {"a": "b"}},
            "load_weights?a": made | {"path": f"tinker://{self.model_id}/weights/a", "optimizer": True,
                                      "base_model": MODEL, "user_metadata": {"a": "b"}},
            "copy_weights": made | {"source_path": f"tinker://{self.model_id}/weights/a", "ttl_seconds": 7200},
            "weights_info": {"tinker_path": f"tinker://{self.model_id}/weights/a"},
            "checkpoints/search": {"project_ids": None, "user_metadata": {"a": "b"}, "checkpoint_type": "training",
                                   "owner": {"type": "own"}, "base_models": [MODEL], "limit": 5,
                                   "cursor": {"last_created_at": "2026-11-06T00:00:00+00:00",
                                              "last_checkpoint_uuid": "a"}},
            "sessions/search": {"session_id": "a", "project_ids": ["default"], "user_metadata": {"a": "b"},
                                "display_name": "n", "owner": {"type": "own", "owner_urns": []},
                                "statuses": [{"type": "client_finished", "reasons": ["success"]}], "limit": 5,
                                "cursor": {"last_created_at": "2026-11-06T00:00:00+00:00", "last_session_id": "a"}},
            "external_weights_upload_start": {"base_model": MODEL, "lora_config": lora, "destination_project_id": None},
            "external_weights_upload_finish": {"upload_id": "upload-1-a"},
            "create_custom_loss": {"session_id": self.session_id, "custom_loss_seq_id": number, "name": "n",
                                   "inputs": [{"name": "logprobs", "rank": 1}], "graph": GRAPH},
            "create_sampling_session": {"session_id": self.session_id, "sampling_session_seq_id": number,
                                        "base_model": MODEL, "model_path": None},
            "join_sampling_session": {"sampling_session_id": self.sampling_id},
            "asample": {
                "num_samples": 1, "sampling_session_id": self.sampling_id, "seq_id": number,
                "prompt": {"chunks": [
                    {"type": "encoded_text", "tokens": [1, 2]},
                    {"type": "image", "data": "iVBORw0KGgo=", "format": "png", "expected_tokens": 4},
                    {"type": "image_asset_pointer", "location": "http://a.example/a", "format": "png",
                     "expected_tokens": 4},
                ]},
                "sampling_params": {"max_tokens": 4, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": -1,
                                    "top_p": 1.0},
                "prompt_logprobs": True, "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0,
                "target_prompt_logprobs": {"data": [1] * 9, "dtype": "int64", "shape": [9, 1],
                                           "sparse_crow_indices": None, "sparse_col_indices": None},
                "prompt_alt_tokens_k": 0, "prompt_logprobs_last_n": 1, "record_stability_info": False,
            },
            "asample?empty": {
                "num_samples": 1, "sampling_session_id": self.sampling_id, "seq_id": number, "prompt": {"chunks": []},
                "sampling_params": {"stop": []},
                "target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [0, 1]},
            },
            "retrieve_future": {"request_id": f"{self.model_id}:0", "allow_metadata_only": True},
            "retrieve_futures": {"target": {"type": "sampling_session", "sampling_session_id": self.sampling_id,
                                            "cloned_sampler_id": 0}, "prev_cursor": 0, "timeout": 0,
                                 "retrieved_request_ids": ["a"]},
            "cancel_future": {"request_id": "a"},
        }  # fmt: skip
        return bodies[route]
