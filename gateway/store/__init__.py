"""What survives a restart: SQLAlchemy tables, one writer, typed access by noun."""
