"""Keys have scopes; futures record which key submitted them, and how many tokens they were estimated to need."""

import time

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """Adds the columns. Existing keys keep the right to train."""
    # If this version created the table of keys, it has the column already. Only shard 0 has the table.
    if _has_keys() and "scope" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("keys")}:
        op.add_column("keys", sa.Column("scope", sa.Text, nullable=False, server_default="train"))
    op.add_column("futures", sa.Column("key_id", sa.Text, nullable=False, server_default=""))
    op.add_column("futures", sa.Column("token_count", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drops the columns. An earlier gateway lets every key train, so keys with another scope are revoked first."""
    op.drop_column("futures", "token_count")
    op.drop_column("futures", "key_id")
    if _has_keys():
        revoking = sa.text("UPDATE keys SET revoked_at = :now WHERE scope <> 'train' AND revoked_at IS NULL")
        op.get_bind().execute(revoking, {"now": time.time()})
        op.drop_column("keys", "scope")


def _has_keys() -> bool:
    return sa.inspect(op.get_bind()).has_table("keys")
