"""What driver, agents, fork servers and ranks send each other, a file for each wire. (either side)

Gets nothing: data classes, and how they become bytes. Gives the types that both ends of a wire
import.

    agent.py              Driver and agent: open a node, run ranks, read what they report
    checkup.py            Driver and agent: the doctor's check-up of a node
    mpirun.py             Driver and agent: mpirun and its daemons
    rank.py               Agent and rank: pause, continue, and what the rank is doing
    request.py            What the driver asks of agents: requests with typed replies, and what
                          carries them
    server.py             Agent and fork server: fork, signal and watch processes
    shards.py             Driver, agent and writer: the shards of a sharded state in memory and on
                          the disk
    wire.py               A message as a packet or a line of JSON
"""
