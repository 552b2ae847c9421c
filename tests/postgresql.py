"""A real PostgreSQL server for tests, from Debian's packages. Tests that need one are skipped without it."""

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from fovea.runtime.hosts import free_ports

USER, PASSWORD = "fovea", "se/cr@t"
_QUOTED = "se%2Fcr%40t"
_SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": "60", "listen_addresses": "127.0.0.1"}


class Server:
    """One cluster in its own folder, on a free port of 127.0.0.1."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="fovea-postgresql-", dir=_memory()))
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_ports(1)[0]

    def create(self) -> None:
        """Creates the cluster."""
        password = self._folder / "password"
        password.write_text(PASSWORD)
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            for path in (self._folder, password):
                shutil.chown(path, "postgres", "postgres")
        arguments = ["--username", USER, "--pwfile", str(password), "--auth", "scram-sha-256", "--no-sync"]
        initdb = [str(self._programs / "initdb"), "-D", str(self._data), "-E", "UTF8", "--locale=C", *arguments]
        made = subprocess.run(initdb, capture_output=True, text=True, **self._identity())  # type: ignore[call-overload]
        assert made.returncode == 0, made.stderr

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", str(self._data), "-p", str(self.port), *settings]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "-k", str(self._folder)], stdout=log, stderr=log, **self._identity()
            )  # type: ignore[call-overload]
        give_up_at = time.monotonic() + 60
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                log_text = (self._folder / "log").read_text()
                assert self._process.poll() is None, log_text
                assert time.monotonic() < give_up_at, log_text
            time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Stops the server: SIGINT aborts running statements, SIGQUIT acts like a crash."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)

    def remove(self) -> None:
        """Removes the cluster."""
        shutil.rmtree(self._folder)

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Runs one statement outside a transaction."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def url(self, port: int | None = None) -> str:
        """Returns the URL of the default database."""
        return f"postgresql://{USER}:{_QUOTED}@127.0.0.1:{port or self.port}/postgres"

    def new_url(self, port: int | None = None) -> str:
        """Creates an empty schema, which is much cheaper than a database; returns its URL.

        Args:
            port: Port of a proxy in front of this server.
        """
        name = f"t{next(self._numbers)}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"{self.url(port)}?options=-csearch_path%3D{name}"

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @staticmethod
    def _identity() -> dict[str, object]:
        return {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}


def _memory() -> Path | None:
    """Returns a folder in memory if there is room, which halves the time of each test. fsync is off anyway."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free >= 2 * 2**30 else None


def find_programs() -> Path | None:
    """Returns the folder of the server's programs, which Debian keeps out of the PATH."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


def why_no_postgresql() -> str:
    """Returns why no server can run here; empty if one can."""
    if find_programs() is None:
        return "no PostgreSQL server here: install Debian's package postgresql"
    if os.geteuid() == 0 and "postgres" not in {entry.pw_name for entry in pwd.getpwall()}:
        return "PostgreSQL does not run as root, and there is no user postgres"
    return ""


@contextmanager
def running_postgresql() -> Iterator[Server]:
    """Runs a new server for tests and programs. Raises SystemExit with the reason if it cannot."""
    programs = find_programs()
    if programs is None or why_no_postgresql():
        raise SystemExit(why_no_postgresql())
    server = Server(programs)
    try:
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A server that all tests share; a test that stops it must start it again."""
    if why := why_no_postgresql():
        pytest.skip(why)
    with running_postgresql() as server:
        yield server


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database: SQLite, or the one that tests/conftest.py selects."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{tmp_path / 'gateway.db'}"
    server: Server = request.getfixturevalue("postgresql")
    return server.new_url()
