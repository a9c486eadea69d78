"""Ray: the connection, the nodes, and the placement of ranks on them. (driver)

Input: a Job. Output: a connection to Ray, the nodes that are alive, and a placement.Plan with one
slot per rank.

    autoscaler.py         Node types of Ray's autoscaler, read from its config file on the head
                          node: Ray has no API for them
    connect.py            The connection to Ray: join a cluster or start one here, and read its
                          nodes
    drain.py              Drain notices: Ray announces that it will take nodes away, with time to
                          save and to leave
    gcs.py                Test whether Ray's GCS (global control service) answers at an address
    local_ray.py          A Ray that this program has started ends with the program, even if the
                          program is killed
    node_history.py       A file of incidents: nodes that failed or slowed earlier runs, which the
                          next run avoids if it can
    nodes.py              Nodes, node types of the autoscaler, resource requests, and whether a
                          request fits
    placement.py          (Job, nodes) -> Plan: the node and the numbers of each rank, or an error
                          if the nodes can't hold them
    ray_private.py        Every use of Ray's private API: Ray has no public API for these
    shortage.py           Texts for a request that the cluster can't hold: request, capacity, what
                          to set instead, what is missing
"""
