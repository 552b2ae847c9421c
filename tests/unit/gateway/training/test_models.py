"""Sessions that the next gateway frees if the previous one ended before it had freed them."""

import pytest
import sqlalchemy as sa

from fovea_gateway.database.schema import custom_losses, journal, metadata, models, sessions
from fovea_gateway.training.models import ids_of_unfreed_sessions

OVER, OPEN = 2.0, None


def rows_of(session_id: str) -> dict[str, tuple[sa.Table, dict[str, object]]]:
    """Returns one row of each kind that a session may own."""
    model_id = f"{session_id}:train:0"
    model = {
        "model_id": model_id, "session_id": session_id, "owner": "o", "base_model": "b", "lora": b"",
        "user_metadata": {}, "created_at": 1.0, "last_request_at": 1.0,
    }  # fmt: skip
    entry = {
        "model_id": model_id, "seq_id": 1, "owner": "o", "session_id": session_id, "kind": "optim_step",
        "drops_gradients": False, "subject": "", "digest": "", "size_bytes": 0,
    }  # fmt: skip
    loss = {"custom_loss_id": f"{session_id}:loss:0", "session_id": session_id, "loss": b"", "created_at": 1.0}
    return {
        "a model in training": (models, {**model, "state": "ready"}),
        "a model that ended": (models, {**model, "state": "ended"}),
        "a command in the journal": (journal, entry),
        "a loss": (custom_losses, loss),
    }


@pytest.mark.parametrize(
    ("what", "ended_at", "is_found"),
    [
        ("a model in training", OVER, True),
        ("a command in the journal", OVER, True),
        ("a loss", OVER, True),
        ("a model that ended", OVER, False),
        ("a model in training", OPEN, False),
        ("a command in the journal", OPEN, False),
    ],
)
def test_unfreed_objects_of_an_ended_session_are_found(what: str, ended_at: float | None, is_found: bool) -> None:
    session = {"session_id": "s", "owner": "o", "tags": [], "user_metadata": {}, "created_at": 1.0, "heartbeat_at": 1.0}
    table, row = rows_of("s")[what]
    engine = sa.create_engine("sqlite://")
    with engine.begin() as connection:
        metadata.create_all(connection)
        connection.execute(sa.insert(sessions).values(**session, ended_at=ended_at))
        connection.execute(sa.insert(table).values(**row))
        assert ids_of_unfreed_sessions(connection) == (["s"] if is_found else [])
    engine.dispose()
