"""An S3 store on this machine: moto's server, with a bucket and credentials for the tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from raydist.state.object_store import Remote, environment

SECRET = "this-must-not-be-written-anywhere"


class Store:
    """A server with one bucket. `env` has the variables that a process needs to reach it."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.env = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
        }  # fmt: skip
        # The servers of one process share their memory: without this, a test finds the files of the
        # one before.
        urlopen(
            Request(f"{self.env['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST"), timeout=30
        ).close()
        with environment(self.env):
            Remote("s3://bucket").store.mkdir("bucket")

    def files(self, below: str = "") -> dict[str, bytes]:
        """Return the contents of the files in the bucket, by path."""
        with environment(self.env):
            bucket = Remote("s3://bucket")
            return {
                path: bytes(bucket.store.cat_file(f"s3://bucket/{path}"))
                for path in bucket.sizes()
                if path.startswith(below)
            }

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()


@contextmanager
def store() -> Iterator[Store]:
    server = Store()
    try:
        yield server
    finally:
        server.stop()
