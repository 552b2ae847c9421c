"""Models record since when their commands are in the journal, and the model files they were trained on; sessions are
parked.

`create_all` creates the journal itself.
"""

import sqlalchemy as sa
from alembic import op

revision = "6"
down_revision = "5"


def upgrade() -> None:
    """Adds the columns. Existing models have no journal: they exist only in their trainer's memory."""
    op.add_column("models", sa.Column("journaled_since", sa.BigInteger))
    op.add_column("models", sa.Column("model_files", sa.JSON, nullable=False, server_default="{}"))
    op.add_column("sessions", sa.Column("parked_at", sa.Float))
    op.add_column("sessions", sa.Column("parked_bytes", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drops the columns and deletes the entries of the journal, because the earlier version cannot replay them."""
    for table in ("journal", "journal_requests"):
        op.execute(f"DELETE FROM {table}")
    op.drop_column("sessions", "parked_bytes")
    op.drop_column("sessions", "parked_at")
    op.drop_column("models", "model_files")
    op.drop_column("models", "journaled_since")
