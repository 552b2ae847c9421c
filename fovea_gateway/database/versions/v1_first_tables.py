"""The tables of the first gateways: `create_all` makes them, so that there is nothing to do."""

revision = "1"
down_revision = None


def upgrade() -> None:
    """Nothing."""
