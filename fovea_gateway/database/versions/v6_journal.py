"""Models say since when their commands are in the journal, and on which files they were trained; sessions are parked.

The journal itself is made by `create_all`.
"""

import sqlalchemy as sa
from alembic import op

revision = "6"
down_revision = "5"


def upgrade() -> None:
    """Adds the columns. Of the models that are there nothing was recorded: they are in their trainer's memory alone."""
    op.add_column("models", sa.Column("journaled_since", sa.BigInteger))
    op.add_column("models", sa.Column("model_files", sa.JSON, nullable=False, server_default="{}"))
    op.add_column("sessions", sa.Column("parked_at", sa.Float))
    op.add_column("sessions", sa.Column("parked_bytes", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drops the columns, and what is in the journal: nobody would go on with it."""
    for table in ("journal", "journal_requests"):
        op.execute(f"DELETE FROM {table}")
    op.drop_column("sessions", "parked_bytes")
    op.drop_column("sessions", "parked_at")
    op.drop_column("models", "model_files")
    op.drop_column("models", "journaled_since")
