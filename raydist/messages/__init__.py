"""Messages between driver, agents, fork servers and ranks, one file per wire. (either side)

Data classes, and their encoding as bytes. Both ends of a wire import its types from here.

    agent.py              Driver and agent: open a node, run ranks, read what they report
    checkup.py            Driver and agent: the doctor's check-up of a node
    command.py            Driver and agent: commands that a person runs alongside a rank
    deputy.py             Driver, agent and deputy: what a node tells if the driver's machine is
                          lost
    mpirun.py             Driver and agent: mpirun and its daemons
    operate.py            Command and driver: inspect and steer a run
    profile.py            What a rank notes in the trace of its profile
    rank.py               Agent and rank: pause, continue, and what the rank is doing
    request.py            Requests of the driver to agents, with typed replies, and their transport
    server.py             Agent and fork server: fork, signal and watch processes
    wire.py               A message as a packet or a line of JSON
    writer.py             Driver, agent and writer: sharded states in memory and on the disk
"""
