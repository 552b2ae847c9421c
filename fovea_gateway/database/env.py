"""What alembic runs to reach the database: it is given the connection, in a transaction that is not its own."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
