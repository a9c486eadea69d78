"""Saved states of a training: checkpoints on disk or at a URL, snapshots in memory. (either side)

Takes a state (tensors, numbers, text). Provides files and memory slots, each complete or absent,
and the restored state.

    checkpoint_files.py   Find, verify, load, write and prune checkpoints; none runs code when it is
                          loaded
    device.py             The device that snapshots are copied from: queue, marks, page-locked
                          memory
    direct_io.py          Writes a file past the page cache (O_DIRECT), and hashes it meanwhile
    distributed_checkpoint.pySharded states on disk, in the format of torch.distributed.checkpoint
                             (DCP)
    object_store.py       Where checkpoints are stored: a folder, or a URL with pathlib's methods
    run_checkpoints.py    Groups a run folder's checkpoints by training, and finds the one for
                          `resume=`
    shard_choice.py       Chooses the newest step of which the shards of all ranks are in memory
    snapshot.py           States in memory that outlive the rank that wrote them, for the next
                          attempt
    snapshot_layout.py    The first page of a snapshot memory: its slots, and what each of them
                          holds
    write.py              Writes checkpoints: complete or not at all, and loadable without running
                          code
"""
