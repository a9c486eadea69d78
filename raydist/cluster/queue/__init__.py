"""The order in which runs of many drivers get room on one Ray cluster. (driver)

Input: a run's ResourceRequest and its settings `queue`. Output: its turn, and later the notice that
a run of higher priority needs its room. There is no server: each driver writes one entry into the
GCS's key-value store, reads all others, and computes the same order.

    entry.py              The entry of a run in the queue, for the other runs: size, priority,
                          state; as JSON
    first_entry.py        The entry with which a run of this process enters the queue
    order.py              (entries, nodes) -> which waiting run may be placed now, which run makes
                          way
    others.py             What a waiting run remembers of the other runs between two looks at the
                          queue
    outer.py              Whether another queue has given this run its machines
    stop_cost.py          What it costs to stop a run: the work since its newest state, and its
                          save
    store.py              The entries in the key-value store of Ray's GCS
    turn.py               A run's way through the queue: it waits for its turn, holds room, makes
                          way
    wait_limits.py        How long a run waits in the queue for what may never come
"""
