"""The tables of the first gateways. `create_all` creates them, so this revision changes nothing."""

revision = "1"
down_revision = None


def upgrade() -> None:
    """Does nothing."""
