"""Where checkpoints are stored: a folder, or a URL with pathlib's methods. (either side)

    s3://bucket/runs, gs://bucket/runs, abfs://container@account…/runs, or another that fsspec opens

fsspec is installed with torch; the driver of a store is a separate package. Credentials come from
the environment, a file in the home folder or the machine's role, as for the store's own tools,
never from a URL, which is printed and saved.
"""

from __future__ import annotations

import fcntl
import fnmatch
import inspect
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from xxhash import xxh3_128

from raydist.shared.errors import ConfigError, RaydistError
from raydist.shared.home import expand_home

DRIVERS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
"""The packages that read and write the URLs of a store, by scheme."""
CLAIM = "settings.json"
"""The settings of the run, without secrets. It is written first, so a node that sees it sees the
storage."""
BLOCK = 1 << 22


class Remote:
    """A folder or file of an object store, which has no real folders: only names with slashes."""

    def __init__(self, url: str, store: Any = None) -> None:
        """Refer to a URL. `store`: the fsspec file system, if there is one already."""
        self.url = url.rstrip("/")
        self._store = store

    @property
    def store(self) -> Any:
        """The connection to the URL's host or account, made at first use; listings are not cached.

        It is never shared with a forked process.
        """
        if self._store is None:
            from fsspec.core import url_to_fs

            # Without the path: a name in it may have `::`, which chains URLs in fsspec.
            root = "/".join(self.url.split("/")[:3])
            self._store, _ = url_to_fs(root, skip_instance_cache=True, use_listings_cache=False)
        return self._store

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}", self._store)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rpartition("/")[0], self._store)

    def absolute(self) -> Remote:
        return self

    def iterdir(self) -> Iterator[Remote]:
        """Yield the direct children; none if the folder does not exist."""
        with suppress(FileNotFoundError):
            for path in self.store.ls(self.url, detail=False):
                yield self / path.rstrip("/").rpartition("/")[2]

    def glob(self, pattern: str) -> Iterator[Remote]:
        """Return the direct children whose names match."""
        return (path for path in self.iterdir() if fnmatch.fnmatch(path.name, pattern))

    def sizes(self) -> dict[str, int]:
        """Return all files below, in one listing: their relative paths and sizes in bytes."""
        found = self.store.find(self.url, detail=True)
        root = self.store._strip_protocol(self.url).rstrip("/") + "/"
        return {path.removeprefix(root): int(facts["size"]) for path, facts in found.items()}

    def changed(self) -> float:
        """Return when the file was written, in seconds since the epoch.

        If the driver of the store does not know, it is the current time.
        """
        try:
            return float(self.store.modified(self.url).timestamp())
        except (NotImplementedError, FileNotFoundError):
            return time.time()

    def exists(self) -> bool:
        return bool(self.store.exists(self.url))

    def is_dir(self) -> bool:
        return next(self.iterdir(), None) is not None

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_bytes(self) -> bytes:
        return bytes(self.store.cat_file(self.url))

    def write_text(self, text: str) -> None:
        self.store.pipe_file(self.url, text.encode())

    def create(self, text: str) -> bool:
        """Write a file, as `create_file` does."""
        if self.exists():
            return False
        if "mode" in inspect.signature(self.store.pipe_file).parameters:
            with suppress(Exception):  # there is one now, or the server knows no such condition
                self.store.pipe_file(self.url, text.encode(), mode="create")
                return True
            if self.exists():
                return False
        self.write_text(text)
        return True

    def put(self, file: Path) -> None:
        """Upload a file of this machine."""
        self.store.put_file(str(file), self.url)

    def drop(self) -> None:
        """Remove the file, or all files below; a missing one is not an error."""
        with suppress(FileNotFoundError):
            self.store.rm(self.url, recursive=True)

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """Yield a file to write to; it exists after the block, unless that raised an error."""
        file = self.store.open(self.url, "wb")
        try:
            yield file
            file.close()
        except BaseException:
            with suppress(Exception):
                file.discard()
            file.closed = True  # otherwise its finalizer would upload what it has
            raise

    def fetch(self, to: Path, checksum: str) -> Path:
        """Return a copy on this machine, which the first process that needs it makes.

        RaydistError: its checksum differs.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{to}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not to.exists():
                coming = Path(f"{to}.coming")
                self.store.get_file(self.url, str(coming))
                if checksum_of(coming) != checksum:
                    coming.unlink()
                    raise RaydistError(f"{self.url} has another checksum than when it was written")
                coming.rename(to)
        return to


StoragePath = Path | Remote


def create_file(path: StoragePath, text: str) -> bool:
    """Write a file unless there is one; return whether it was written.

    Of several processes that do so at the same moment one writes it. Drivers of stores before 2025
    and some servers of S3 cannot promise that: there two that begin within milliseconds both do.
    """
    if isinstance(path, Remote):
        return path.create(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("x")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(text)
    except BaseException:
        path.unlink()
        raise
    return True


class Hashing:
    """A file to write to that counts its bytes, and hashes them with XXH3-128."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hash = xxh3_128()
        self.bytes = 0

    def write(self, block: bytes) -> int:
        self._hash.update(block)
        self.bytes += len(block)
        self._file.write(bytes(block))
        return len(block)

    def flush(self) -> None:
        """Do nothing: the file is uploaded when it is closed."""

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()


def checksum_of(path: Path) -> str:
    """Return the XXH3-128 of a file."""
    total = xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            total.update(block)
    return total.hexdigest()


def scheme(text: str) -> str:
    """Return `s3` for s3://bucket; empty for a path."""
    return text.partition("://")[0] if "://" in text else ""


def parse_path(text: str, key: str = "storage") -> StoragePath:
    """Return a Path, or a Remote for a URL.

    `key`: the setting, for the ConfigError of an unknown home folder.
    """
    if scheme(text) not in ("", "file"):
        return Remote(text)
    return expand_home(key, text.removeprefix("file://")).absolute()


def check_url(word: str, text: str) -> None:
    """Raise ConfigError for a URL that can't be right, or must not be saved.

    `word`: the setting that it was given for.
    """
    kind = scheme(text)
    if kind in ("", "file"):
        return
    parts = urlsplit(text)
    if parts.password or parts.query:
        cause = (
            "a password or signature in it would be saved and printed; put credentials into "
            "env_file="
        )
        raise ConfigError.of(
            word, f"{kind}://…", cause, f"{word}={kind}://{parts.hostname or 'bucket'}{parts.path}"
        )
    if not parts.netloc:
        raise ConfigError.of(word, text, "it names no bucket", f"{word}={kind}://BUCKET/FOLDER")
    import fsspec

    if "::" in text or kind == "memory" or kind not in {*DRIVERS, *fsspec.available_protocols()}:
        cause = f"runs cannot be stored at {kind}://, but at s3://, gs://, abfs:// or a path"
        raise ConfigError.of(word, text, cause, f"{word}=s3://BUCKET/FOLDER")
    try:
        fsspec.get_filesystem_class(kind)
    except ImportError as error:
        package = DRIVERS.get(kind)
        mend = f"pip install {package}, here and on every node" if package else str(error)
        raise ConfigError(
            f"{word}={text}: no driver for {kind}:// is installed; {mend}", word, text, mend
        ) from error


def reason(error: BaseException) -> str:
    """Return an error of a store in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"


_environment = threading.RLock()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, and restore the former ones after it.

    One thread at a time.
    """
    if not variables:
        yield
        return
    with _environment:
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in [name for name in os.environ if name not in before]:
                del os.environ[name]
            # No variable is missing at any time, because another thread may read it.
            os.environ.update(before)


def why_blind(text: str) -> str:
    """Return why this process can't see a file, by path or URL; empty if it can."""
    try:
        check_url("storage", text)
        return "" if parse_path(text).exists() else f"there is no {text}"
    except ConfigError as error:
        return error.message
    except Exception as error:
        return reason(error)


def main() -> None:
    """Print why this machine can't see a file, or nothing.

    Run as `python -m raydist.state.object_store FILE`.
    """
    import sys

    print(why_blind(sys.argv[1]), end="")


if __name__ == "__main__":
    main()
