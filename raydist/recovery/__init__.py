"""While ranks run: which fail, hang or are slow, and what happens then. (driver)

It gets a running worker group. It returns how each rank ended, the first cause, and the next
attempt or the reason why there is none.

    agent_calls.py        The open call to each agent; agents that do not answer, and what their
                          nodes know
    arrival.py            The beginning of an attempt: all ranks meet, the first step; what a
                          restart cost
    attempts.py           All attempts of a run: what each starts from, how it ends, what follows,
                          the outcome
    blame.py              How the ranks of an attempt ended -> the first cause, the reason for it,
                          and a text
    classify.py           The report of a rank's end, and the driver's records of the attempt -> how
                          it ended
    clocks.py             Times of nodes' clocks -> of the driver's: clocks differ by more than
                          failures do
    cut_monitor.py        Notices, while ranks train, that a node is cut off and the run can
                          continue without it
    deadlines.py          How long to wait before ranks are stopped, and for agents that do not
                          answer
    hang.py               Examines all ranks when one is silent too long; ends the run for a certain
                          hang
    hang_evidence.py      The files about a hang in the folder of the logs, and what further
                          witnesses say
    hang_verdict.py       What silent ranks are doing -> which of them block the others, and how
                          certain that is
    in_place.py           Which ranks keep their processes when another was killed, and how all of
                          them meet
    leave_monitor.py      Notices, while ranks train, that they must leave: for a drain, or for
                          another run
    phases.py             (phase of an attempt, what happens) -> the next phase, and what to do: a
                          table
    policy.py             (rule, attempts so far) -> retry in place, retry elsewhere, or give up and
                          why
    quiesce.py            Has all ranks stop after the same step, for a drain or for another number
                          of ranks
    rank_logs.py          What each rank printed, in the run folder: rank-N.log, and rank-N.nccl of
                          NCCL
    resize.py             Notices, while ranks train, that nodes have joined, or that another run
                          needs some
    silences.py           Which agents have not answered for too long
    stall.py              Heartbeats -> whether a rank is silent for longer than its own steps
                          explain
    straggler.py          Each rank's own work in a step, and its pauses -> the ranks that slow down
                          the others
    supervisor.py         Receives messages of all ranks until each ends; stops the others once one
                          has failed
    suspects.py           Which nodes may be lost: none of their agents has answered in time
"""
