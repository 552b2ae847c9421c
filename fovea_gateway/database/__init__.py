"""Where the state is kept: SQLAlchemy tables in SQLite or PostgreSQL, one writer, one owner."""
