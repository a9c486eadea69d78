"""Opens the rendezvous of an attempt: a store on rank 0's node, or a file. (driver)"""

from __future__ import annotations

from pathlib import Path

from raydist.launch.limits import ANSWER_S
from raydist.messages.request import Transport
from raydist.messages.server import OpenStore, StoreAddress, StoreKind
from raydist.network.variables import Rendezvous
from raydist.settings.config import Job


def store_kind(job: Job) -> StoreKind:
    """Return the kind of store that the job's backend needs."""
    return "horovod" if job.backend.name == "horovod" else "tcp"


def rendezvous_file(job: Job, attempt: int) -> Path | None:
    """Return the file of init_method=file, which does not exist yet; None for other methods."""
    if job.init_method != "file":
        return None
    file = Path(job.dir).absolute() / ("rendezvous" + (f"-{attempt}" if attempt else ""))
    file.parent.mkdir(parents=True, exist_ok=True)
    # torch deletes it when the ranks end by themselves. An earlier run in this folder may have been
    # killed, and the new ranks would look for its addresses.
    file.unlink(missing_ok=True)
    return file


def rendezvous_at(
    address: str, store: StoreAddress | None, file: Path | None, attempt: int
) -> Rendezvous:
    """Return the rendezvous of an attempt. `address`: on rank 0's node."""
    port, secret = (store.port, store.secret) if store else (None, "")
    return Rendezvous(address, port, str(file) if file else None, secret, attempt)


def open_rendezvous(call: Transport, job: Job, address: str, attempt: int) -> Rendezvous:
    """Open the rendezvous of another attempt; rank 0's agent replaces its store."""
    file, store = rendezvous_file(job, attempt), None
    if file is None:
        store = call(0, OpenStore(store_kind(job), address)).result(ANSWER_S)
    return rendezvous_at(address, store, file, attempt)
