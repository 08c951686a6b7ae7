"""The SQLite file of a data directory: its lock, its tables, and connections that threads can share.

Reads run side by side, each on one state of the database; writes take turns. What a write did is on the disk when it
ends, whole or not at all.
"""

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from service.errors import ConflictError, NotReadyError

DATABASE_FILE = "nearsense.sqlite3"
LOCK_FILE = "nearsense.lock"
BUSY_TIMEOUT_S = 5.0
# FULL, since with NORMAL a power cut may take back transactions that WAL had acknowledged.
PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON")


def now() -> str:
    """Give the time as the database keeps it: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def m001_collections_and_documents(db: sqlite3.Connection) -> None:
    """Make the first tables. AUTOINCREMENT, since an id that came back would give an old vector to a new document."""
    db.execute(
        """
        CREATE TABLE collections (
            collection_id INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL UNIQUE,
            fingerprint TEXT NOT NULL,
            dimensions INTEGER NOT NULL,
            created TEXT NOT NULL,
            change INTEGER NOT NULL DEFAULT 0
        )
        """
    )
    # The vector stands before the text: SQLite reads a long row from its start, and a rebuild wants the vector alone.
    db.execute(
        """
        CREATE TABLE documents (
            vector_id INTEGER PRIMARY KEY AUTOINCREMENT,
            collection_id INTEGER NOT NULL REFERENCES collections ON DELETE CASCADE,
            change INTEGER NOT NULL,
            updated TEXT NOT NULL,
            document_id TEXT NOT NULL,
            text_hash BLOB NOT NULL,
            vector BLOB NOT NULL,
            metadata TEXT NOT NULL,
            text TEXT NOT NULL,
            UNIQUE (collection_id, document_id)
        )
        """
    )
    db.execute("CREATE INDEX documents_by_change ON documents (collection_id, change)")


# In the order they are applied. Append only: databases remember them by name.
MIGRATIONS = (m001_collections_and_documents,)


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    db.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied TEXT NOT NULL)")
    applied = {name for (name,) in db.execute("SELECT name FROM migrations")}
    if unknown := applied.difference(migration.__name__ for migration in MIGRATIONS):
        raise ConflictError(
            f"{path} was written by a newer release (it has {', '.join(sorted(unknown))}); "
            "upgrade nearsense or use another data directory"
        )
    for migration in MIGRATIONS:
        if migration.__name__ not in applied:
            with _transaction(db):
                migration(db)
                db.execute("INSERT INTO migrations VALUES (?, ?)", (migration.__name__, now()))


def _lock(data_dir: Path) -> int:
    """Lock a directory until the descriptor is closed, at the latest by the end of the process."""
    descriptor = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise
        raise ConflictError(
            f"{data_dir} can be used by one process at a time, and process {holder} has it open; "
            "stop that one or use another data directory"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    # A connection may change threads, and is never used by two at once.
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        for pragma in (*PRAGMAS, f"query_only={'ON' if read_only else 'OFF'}"):
            db.execute(f"PRAGMA {pragma}")
    except sqlite3.Error:
        db.close()
        raise
    return db


@contextmanager
def _transaction(db: sqlite3.Connection, *, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    db.execute(begin)
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # some failures, as of a full disk, have rolled back already
            db.execute("ROLLBACK")
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what a disk or a damaged file can cause into an error that says so; faults of ours pass as they are."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if type(error) not in (sqlite3.DatabaseError, sqlite3.OperationalError):
            raise
        raise NotReadyError(
            f"{path} could not be used and nothing was stored: {error}; see whether the disk is full, and restore a "
            "backup if the file is damaged"
        ) from error


class Database:
    """The database of one data directory, held by this process alone; made by `open`."""

    def __init__(self, path: Path, *, writer: sqlite3.Connection, resources: ExitStack) -> None:
        self._path = path
        self._writer = writer
        self._write_lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._idle_lock = threading.Lock()
        self._closed = False
        self._resources = resources

    @classmethod
    def open(cls, data_dir: Path) -> "Database":
        """Open the database and lock its directory; see `Store.open`."""
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise NotReadyError(
                f"the data directory {data_dir} cannot be made ({error.strerror}); name one that can with --data"
            ) from error
        path = data_dir / DATABASE_FILE
        with ExitStack() as resources, _explained(path):
            resources.callback(os.close, _lock(data_dir))
            writer = _connect(path)
            resources.callback(writer.close)
            _migrate(writer, path)
            return cls(path, writer=writer, resources=resources.pop_all())

    def close(self) -> None:
        """Finish the write in progress, then close the database and release the directory; see `Store.close`."""
        with self._write_lock, self._idle_lock:
            self._closed = True
            while self._idle:  # before the writer, since the last one to close folds the log into the database
                self._idle.pop().close()
            self._resources.close()

    def purge(self) -> None:
        """Rewrite the database without what was deleted, and cut the log; see `Store.purge`."""
        with self._write_lock, _explained(self._path):
            self._require_open()
            self._writer.execute("VACUUM")
            busy, *_ = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise NotReadyError("deleted texts may still be on the disk, since a reader was busy; purge again")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Lend the one connection that writes, in a transaction: committed at the end, undone by an exception.

        Raises:
            NotReadyError: The disk is full or failed, and nothing was written; or the database is closed.
        """
        with self._write_lock, _explained(self._path):
            self._require_open()
            with _transaction(self._writer):
                yield self._writer

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection on which everything that is read belongs to one state of the database.

        Raises:
            NotReadyError: The disk failed, the file is damaged, or the database is closed.
        """
        with _explained(self._path):
            with self._idle_lock:
                self._require_open()
                db = self._idle.pop() if self._idle else None
            db = db or _connect(self._path, read_only=True)
            try:
                with _transaction(db, begin="BEGIN"):
                    yield db
            finally:
                self._give_back(db)

    def _give_back(self, db: sqlite3.Connection) -> None:
        with self._idle_lock:
            if self._closed:
                db.close()
            else:
                self._idle.append(db)

    def _require_open(self) -> None:
        if self._closed:
            raise NotReadyError(f"{self._path} is closed, since the service is shutting down")
