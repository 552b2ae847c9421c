"""Sessions have names, sampling sessions follow a model, futures are listed in the order in which they ended."""

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Adds columns and indexes."""
    op.add_column("sessions", sa.Column("display_name", sa.Text))
    op.add_column("sampling_sessions", sa.Column("followed_model_id", sa.Text))
    op.add_column("sampling_sessions", sa.Column("client_count", sa.BigInteger, nullable=False, server_default="0"))
    op.create_index("ix_sampling_sessions_followed_model_id", "sampling_sessions", ["followed_model_id"])
    op.create_index("ix_sampling_sessions_snapshot_id", "sampling_sessions", ["snapshot_id"])
    op.add_column("futures", sa.Column("finish_number", sa.BigInteger))
    op.create_index("futures_by_finish", "futures", ["scope", "finish_number"])
