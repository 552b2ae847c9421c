"""API keys have ids, and can be created and revoked while the gateway runs."""

from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Moves the keys to their new table. All of them came with the settings, and each owner keeps its name."""
    op.execute(
        "INSERT INTO keys (key_id, key_hash, owner, name, source, created_at)"
        " SELECT substr(key_hash, 1, 12), key_hash, owner, '', 'configured', created_at FROM api_keys"
        " WHERE key_hash NOT IN (SELECT key_hash FROM keys)"
    )
    op.drop_table("api_keys")
