"""The gateway's persistent state: SQLAlchemy tables in SQLite or PostgreSQL, with a single writer and a single
owner.
"""
