"""The database tables.

Blobs are stored apart from the rows that are searched, so that scans stay small. Text columns have no length, since
PostgreSQL would enforce it and SQLite would not.

`create_all` creates the tables. A change to a table needs functions in `revisions` and a new REVISION; a gateway
refuses to start on a database with an unknown revision.

With shards, each has the tables in a schema of its own, except those in `COMMON`. A function in `revisions` that
changes one of these must do so only where the table is: in the schema of shard 0.
"""

import sqlalchemy as sa

REVISION = "7"
"""The latest revision in `revisions`."""

metadata = sa.MetaData()

# The same table that alembic creates.
alembic_version = sa.Table("alembic_version", metadata, sa.Column("version_num", sa.String(32), primary_key=True))

# For gateways from before alembic: see `migrations`.
schema_version = sa.Table("schema_version", metadata, sa.Column("version", sa.Integer, primary_key=True))

# The gateway that owns the state, and its last committed transaction: see `writer`. Empty in SQLite.
owner = sa.Table(
    "state_owner",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("last_mark", sa.BigInteger, nullable=False),
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("key_hash", sa.Text, nullable=False, unique=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("scope", sa.Text, nullable=False, server_default="train"),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
    sa.Column("revoked_at", sa.Float),
)

# An owner without a record has the defaults.
owners = sa.Table(
    "owners",
    metadata,
    sa.Column("owner", sa.Text, primary_key=True),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("max_models", sa.BigInteger, nullable=False),
    sa.Column("max_stored_bytes", sa.BigInteger, nullable=False),
    sa.Column("max_tokens_in_flight", sa.BigInteger, nullable=False),
    sa.Column("max_requests_per_s", sa.Float, nullable=False),
)

# The trainers that an operator drains: their models move to others.
drained_trainers = sa.Table("drained_trainers", metadata, sa.Column("address", sa.Text, primary_key=True))

# The curves that the page at / shows, by model: see `fovea_gateway.live`.
live_curves = sa.Table(
    "live_curves",
    metadata,
    sa.Column("model_id", sa.Text, primary_key=True),
    sa.Column("updated_at", sa.Float, nullable=False),
    sa.Column("curves", sa.LargeBinary, nullable=False),
)

# Names, notes and tags that people give to runs on the live page.
run_labels = sa.Table(
    "run_labels",
    metadata,
    sa.Column("model_id", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("notes", sa.Text, nullable=False),
    sa.Column("tags", sa.JSON, nullable=False),
)

usage = sa.Table(
    "usage",
    metadata,
    sa.Column("owner", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("day", sa.Text, primary_key=True),
    sa.Column("trained_tokens", sa.BigInteger, nullable=False),
    sa.Column("scored_tokens", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("sampled_tokens", sa.BigInteger, nullable=False),
    sa.Column("gpu_seconds", sa.Float, nullable=False),
)

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("session_id", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False, index=True),
    sa.Column("request_key", sa.Text),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON, nullable=False),
    sa.Column("display_name", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("heartbeat_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("end_reason", sa.Text),
    sa.Column("end_detail", sa.Text),
    sa.Column("next_sampling_number", sa.BigInteger, nullable=False, default=0),
    sa.Column("parked_at", sa.Float),
    sa.Column("parked_bytes", sa.BigInteger, nullable=False, default=0),
    sa.UniqueConstraint("owner", "request_key"),
)

# The projects of sessions that have one. It is a separate table, so that `create_all` adds it to an older database.
session_projects = sa.Table(
    "session_projects",
    metadata,
    sa.Column("session_id", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Index("session_projects_of_owner", "owner", "project_id"),
)

# See `access.audit_log`. An entry of repeated work stands for `count` requests between `at` and `until`.
# `new_values` is JSON, or empty.
audit_entries = sa.Table(
    "audit_entries",
    metadata,
    sa.Column("entry_id", sa.Text, primary_key=True),
    sa.Column("at", sa.Float, nullable=False, index=True),
    sa.Column("until", sa.Float, nullable=False),
    sa.Column("count", sa.BigInteger, nullable=False),
    sa.Column("owner", sa.Text, nullable=False, index=True),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("route", sa.Text, nullable=False),
    sa.Column("object_id", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("new_values", sa.Text, nullable=False, default="", server_default=""),
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("model_id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False, index=True),
    sa.Column("owner", sa.Text, nullable=False, index=True),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("lora", sa.LargeBinary, nullable=False),
    sa.Column("user_metadata", sa.JSON, nullable=False),
    sa.Column("trainer_instance", sa.Text, nullable=False, default=""),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("state_reason", sa.Text, nullable=False, default=""),
    sa.Column("next_seq_id", sa.BigInteger, nullable=False, default=0),
    sa.Column("next_snapshot", sa.BigInteger, nullable=False, default=1),
    sa.Column("failed_seq_id", sa.BigInteger),
    sa.Column("failed_reason", sa.Text, nullable=False, default=""),
    sa.Column("is_accumulating", sa.Boolean, nullable=False, default=False),
    sa.Column("journaled_since", sa.BigInteger),
    sa.Column("model_files", sa.JSON, nullable=False, default={}),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("last_request_at", sa.Float, nullable=False),
)

sampling_sessions = sa.Table(
    "sampling_sessions",
    metadata,
    sa.Column("sampling_session_id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False, index=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("request_seq_id", sa.BigInteger),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("model_path", sa.Text),
    sa.Column("snapshot_id", sa.Text, nullable=False, default="", index=True),
    sa.Column("followed_model_id", sa.Text, index=True),
    sa.Column("client_count", sa.BigInteger, nullable=False, default=0),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.UniqueConstraint("session_id", "request_seq_id"),
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("snapshot_id", sa.Text, primary_key=True),
    sa.Column("model_id", sa.Text, nullable=False, index=True),
    sa.Column("identity", sa.LargeBinary, nullable=False),
    sa.Column("uri", sa.Text, nullable=False, default=""),
    sa.Column("trainer_instance", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("path", sa.Text, primary_key=True),
    sa.Column("model_id", sa.Text, nullable=False, index=True),
    sa.Column("owner", sa.Text, nullable=False, index=True),
    sa.Column("segment", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("uri", sa.Text, nullable=False),
    sa.Column("snapshot_id", sa.Text, nullable=False, default=""),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("lora", sa.LargeBinary, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False, default=0),
    sa.Column("size_bytes", sa.BigInteger, nullable=False, default=0),
    sa.Column("user_metadata", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
)

# Checkpoints that every caller may read. It is a separate table, so that `create_all` adds it to an older database.
published = sa.Table(
    "published",
    metadata,
    sa.Column("path", sa.Text, primary_key=True),
    sa.Column("published_at", sa.Float, nullable=False),
)

custom_losses = sa.Table(
    "custom_losses",
    metadata,
    sa.Column("custom_loss_id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False, index=True),
    sa.Column("loss", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)

# Samples that `stable_reinforce` may train on: see `sampling.recordings`. One row per request, with its prompt.
recordings = sa.Table(
    "recordings",
    metadata,
    sa.Column("future_id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False, index=True),
    sa.Column("owner", sa.Text, nullable=False, index=True),
    sa.Column("temperature", sa.Float, nullable=False),
    sa.Column("used_at", sa.Float, nullable=False, index=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("prompt", sa.LargeBinary, nullable=False),
)

recorded_sequences = sa.Table(
    "recorded_sequences",
    metadata,
    sa.Column("sequence_id", sa.Text, primary_key=True),
    sa.Column("future_id", sa.Text, nullable=False, index=True),
    sa.Column("tokens", sa.LargeBinary, nullable=False),
    sa.Column("logprobs", sa.LargeBinary, nullable=False),
    sa.Column("support", sa.LargeBinary),
)

copies = sa.Table(
    "copies",
    metadata,
    sa.Column("model_id", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("request_key", sa.Text),
    sa.Column("source_path", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.UniqueConstraint("owner", "request_key"),
)

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
)

futures = sa.Table(
    "futures",
    metadata,
    sa.Column("future_id", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("session_id", sa.Text, nullable=False, index=True),
    sa.Column("scope", sa.Text, nullable=False),
    sa.Column("seq_id", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float, index=True),
    sa.Column("finish_number", sa.BigInteger),
    sa.Column("key_id", sa.Text, nullable=False, server_default=""),
    sa.Column("token_count", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("futures_by_finish", "scope", "finish_number"),
)

future_requests = sa.Table(
    "future_requests",
    metadata,
    sa.Column("future_id", sa.Text, primary_key=True),
    sa.Column("request", sa.LargeBinary, nullable=False),
)

future_results = sa.Table(
    "future_results",
    metadata,
    sa.Column("future_id", sa.Text, primary_key=True),
    sa.Column("result", sa.LargeBinary, nullable=False),
)

# Commands on models with effects that are not durable in the trainer yet: see `training.journal`.
journal = sa.Table(
    "journal",
    metadata,
    sa.Column("model_id", sa.Text, primary_key=True),
    sa.Column("seq_id", sa.BigInteger, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("drops_gradients", sa.Boolean, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
)

journal_requests = sa.Table(
    "journal_requests",
    metadata,
    sa.Column("model_id", sa.Text, primary_key=True),
    sa.Column("seq_id", sa.BigInteger, primary_key=True),
    sa.Column("request", sa.LargeBinary, nullable=False),
)

# The numerics that each command ran with. It is a separate table, so that `create_all` adds it to an older database;
# entries of an older database have no row here.
journal_numerics = sa.Table(
    "journal_numerics",
    metadata,
    sa.Column("model_id", sa.Text, primary_key=True),
    sa.Column("seq_id", sa.BigInteger, primary_key=True),
    sa.Column("numerics", sa.JSON, nullable=False),
)

# The gateway of each shard: its addresses, and what it reports every second. Empty without shards.
shard_owners = sa.Table(
    "shard_owners",
    metadata,
    sa.Column("shard", sa.BigInteger, primary_key=True),
    sa.Column("rest", sa.Text, nullable=False),
    sa.Column("grpc", sa.Text, nullable=False),
    sa.Column("report", sa.JSON, nullable=False),
    sa.Column("updated_at", sa.Float, nullable=False),
)

COMMON = (keys, owners, drained_trainers, secrets, checkpoints, published, snapshots, shard_owners)
"""The tables that all shards share. They are in the schema of shard 0."""
SEEN_WHOLE = (sessions, session_projects, models, usage, audit_entries, run_labels)
"""The tables of shards that `Database.read_whole` reads as one."""
