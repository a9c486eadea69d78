"""Connect to Ray, read its nodes, and place ranks on them. (driver)

Input: a Job. Output: a connection to Ray, the nodes that are alive, and a placement.Plan with one
slot per rank.

    autoscaler.py         Node types of Ray's autoscaler, read from its config file: Ray has no API
                          for them
    connect.py            Join a Ray cluster or start one here, and read its nodes
    drain.py              Drain notices: Ray announces that it will remove nodes, with time to save
                          and leave
    gcs.py                Test whether Ray's GCS (global control service) answers at an address
    local_ray.py          Make a Ray that this program started end with the program, even if it is
                          killed
    node_history.py       A file of nodes that failed or slowed earlier runs, which later runs avoid
                          if they can
    nodes.py              Nodes, node types of the autoscaler, resource requests, and whether a
                          request fits
    placement.py          (Job, nodes) -> Plan: each rank's node and numbers, or an error if the
                          nodes lack room
    queue/                The order in which runs of many drivers get room on one Ray cluster
    ray_private.py        Every use of Ray's private API: Ray has no public API for these
    reach.py              Which addresses are there: the kernel of each accepts or refuses a
                          connection
    shortage.py           Texts for a request that the cluster can't hold: what is missing, what to
                          set instead
"""
