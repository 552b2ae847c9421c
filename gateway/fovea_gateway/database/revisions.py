"""The revisions of the tables, for the migrations of a database from an earlier gateway and back to one.

`UPGRADES` and `DOWNGRADES` have a function for each revision. Revision 1 is that of the first gateways.
"""

import time
from collections.abc import Callable, Mapping

import sqlalchemy as sa
from alembic import op


def follow_models() -> None:
    """Names sessions, lets sampling sessions follow a model, and lists futures in the order in which they ended."""
    op.add_column("sessions", sa.Column("display_name", sa.Text))
    op.add_column("sampling_sessions", sa.Column("followed_model_id", sa.Text))
    op.add_column("sampling_sessions", sa.Column("client_count", sa.BigInteger, nullable=False, server_default="0"))
    op.create_index("ix_sampling_sessions_followed_model_id", "sampling_sessions", ["followed_model_id"])
    op.create_index("ix_sampling_sessions_snapshot_id", "sampling_sessions", ["snapshot_id"])
    op.add_column("futures", sa.Column("finish_number", sa.BigInteger))
    op.create_index("futures_by_finish", "futures", ["scope", "finish_number"])


def move_keys() -> None:
    """Moves the keys to a table in which they have ids, and can be created and revoked while the gateway runs.

    All of them came with the settings, and each owner keeps its name.
    """
    op.execute(
        "INSERT INTO keys (key_id, key_hash, owner, name, source, created_at)"
        " SELECT substr(key_hash, 1, 12), key_hash, owner, '', 'configured', created_at FROM api_keys"
        " WHERE key_hash NOT IN (SELECT key_hash FROM keys)"
    )
    op.drop_table("api_keys")


def note_gradients() -> None:
    """Records whether a model has gradients that no step has used yet.

    This is unknown for existing models, so it is true: their gradients, if any, are kept.
    """
    op.add_column("models", sa.Column("is_accumulating", sa.Boolean, nullable=False, server_default=sa.true()))


def add_scopes() -> None:
    """Gives keys scopes, and records the key and the estimated tokens of a future. Existing keys may still train."""
    if _has_keys() and _lacks("keys", "scope"):  # only shard 0 has the table
        op.add_column("keys", sa.Column("scope", sa.Text, nullable=False, server_default="train"))
    op.add_column("futures", sa.Column("key_id", sa.Text, nullable=False, server_default=""))
    op.add_column("futures", sa.Column("token_count", sa.BigInteger, nullable=False, server_default="0"))


def drop_scopes() -> None:
    """Drops the columns. An earlier gateway lets every key train, so keys with another scope are revoked first."""
    op.drop_column("futures", "token_count")
    op.drop_column("futures", "key_id")
    if _has_keys():
        revoking = sa.text("UPDATE keys SET revoked_at = :now WHERE scope <> 'train' AND revoked_at IS NULL")
        op.get_bind().execute(revoking, {"now": time.time()})
        op.drop_column("keys", "scope")


def _has_keys() -> bool:
    return sa.inspect(op.get_bind()).has_table("keys")


def _lacks(table: str, column: str) -> bool:
    """Returns whether the earlier version created the table; otherwise this one did, with the column."""
    return column not in {each["name"] for each in sa.inspect(op.get_bind()).get_columns(table)}


def add_journal() -> None:
    """Records since when the commands of a model are in the journal, and its files; and parks sessions.

    `create_all` creates the journal itself. Existing models have none: they exist only in their trainer's memory.
    """
    op.add_column("models", sa.Column("journaled_since", sa.BigInteger))
    op.add_column("models", sa.Column("model_files", sa.JSON, nullable=False, server_default="{}"))
    op.add_column("sessions", sa.Column("parked_at", sa.Float))
    op.add_column("sessions", sa.Column("parked_bytes", sa.BigInteger, nullable=False, server_default="0"))


def drop_journal() -> None:
    """Drops the columns and deletes the entries of the journal, because the earlier version cannot replay them."""
    for table in ("journal", "journal_requests"):
        op.execute(f"DELETE FROM {table}")
    op.drop_column("sessions", "parked_bytes")
    op.drop_column("sessions", "parked_at")
    op.drop_column("models", "model_files")
    op.drop_column("models", "journaled_since")


def add_new_values() -> None:
    """Gives audit entries the values of an object after its change. Earlier entries have theirs in `object_id`."""
    if _lacks("audit_entries", "new_values"):
        op.add_column("audit_entries", sa.Column("new_values", sa.Text, nullable=False, server_default=""))


def drop_new_values() -> None:
    """Drops the column with its values."""
    op.drop_column("audit_entries", "new_values")


UPGRADES: Mapping[int, Callable[[], None]] = {
    2: follow_models,
    3: move_keys,
    4: note_gradients,
    5: add_scopes,
    6: add_journal,
    7: add_new_values,
}
"""Functions that migrate the tables of the previous revision to this one."""
DOWNGRADES: Mapping[int, Callable[[], None]] = {5: drop_scopes, 6: drop_journal, 7: drop_new_values}
"""Functions that migrate the tables of this revision to the previous one."""
