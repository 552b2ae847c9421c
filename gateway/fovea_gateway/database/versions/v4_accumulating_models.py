"""A model records whether it has gradients that no step has used yet."""

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """Adds the column. Its value is unknown for existing models, so it is true: their gradients, if any, are kept."""
    op.add_column("models", sa.Column("is_accumulating", sa.Boolean, nullable=False, server_default=sa.true()))
