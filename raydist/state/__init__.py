"""Saved states of a training: checkpoints on a disk or in an object store, snapshots in memory.
(either side)

Gets a state (tensors, numbers, text). Gives files and memory slots, each complete or absent, and
the state again.

    checkpoint_files.py   Find, verify, load, write and prune checkpoints; none runs code when it is
                          loaded
    device.py             The device that a snapshot is copied from: its queue of copies, marks in
                          that queue, page-locked memory
    direct_io.py          A file that is written past the page cache (O_DIRECT), and hashed
                          meanwhile
    distributed_checkpoint.pySharded states on disk, in the format of torch.distributed.checkpoint
                             (DCP)
    object_store.py       The place of checkpoints: a folder, or a URL of an object store with
                          pathlib's methods
    run_checkpoints.py    Which checkpoints of a run folder belong together, and which of them
                          `resume=` means
    shard_choice.py       Which shards in memory are a whole state: the newest step of which those
                          of all ranks exist
    snapshot.py           States in memory that outlive the rank that wrote them; the next attempt
                          reads them
    snapshot_layout.py    The first page of a snapshot memory: its slots, and what each of them
                          holds
    write.py              Write checkpoints: complete or not at all, and loadable without running
                          code
"""
