"""From the tables of one version to those of the next, in SQL that SQLite and PostgreSQL share.

New tables need no entry: `create_all` makes them.
"""

STEPS: dict[int, tuple[str, ...]] = {
    1: (
        "ALTER TABLE sessions ADD COLUMN display_name TEXT",
        "ALTER TABLE sampling_sessions ADD COLUMN followed_model_id VARCHAR(128)",
        "ALTER TABLE sampling_sessions ADD COLUMN client_count BIGINT NOT NULL DEFAULT 0",
        "CREATE INDEX ix_sampling_sessions_followed_model_id ON sampling_sessions (followed_model_id)",
        "CREATE INDEX ix_sampling_sessions_snapshot_id ON sampling_sessions (snapshot_id)",
        "ALTER TABLE futures ADD COLUMN finish_number BIGINT",
        "CREATE INDEX futures_by_finish ON futures (scope, finish_number)",
    ),
    2: (
        # Whoever had a key keeps what it owns, under the same name. All keys came with the settings then.
        "INSERT INTO keys (key_id, key_hash, owner, name, source, created_at)"
        " SELECT substr(key_hash, 1, 12), key_hash, owner, '', 'configured', created_at FROM api_keys"
        " WHERE key_hash NOT IN (SELECT key_hash FROM keys)",
        "DROP TABLE api_keys",
    ),
    # Of a model in training nobody knows: what may be there is kept.
    3: ("ALTER TABLE models ADD COLUMN is_accumulating BOOLEAN NOT NULL DEFAULT TRUE",),
}
"""By the version that they start from."""
