"""Keys have scopes; futures say which key submitted them, and how many tokens they were taken to need."""

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """Adds the columns. A key of before trains, as it did."""
    # Where the table of keys is as new as this gateway, it has the column.
    if "scope" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("keys")}:
        op.add_column("keys", sa.Column("scope", sa.Text, nullable=False, server_default="train"))
    op.add_column("futures", sa.Column("key_id", sa.Text, nullable=False, server_default=""))
    op.add_column("futures", sa.Column("token_count", sa.BigInteger, nullable=False, server_default="0"))
