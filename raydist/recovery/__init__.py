"""While ranks run: who fails, hangs or is slow, and what happens then. (driver)

Gets a running worker group. Gives how each rank ended, the first cause, and the next attempt or the
reason why there is none.

    arrival.py            When all ranks had met and the first step was done; after a restart, what
                          the restart cost
    attempts.py           Attempt after attempt: what each starts from, how it ends, what follows
                          it, and what the run ends with
    blame.py              How the ranks of an attempt ended -> the first cause, the reason for it,
                          and the text that a person reads
    classify.py           A rank's report of its end, and what the driver knows of the attempt ->
                          how the rank ended
    clocks.py             Times of the nodes' clocks -> times of the driver's: clocks differ by more
                          than failures do
    deadlines.py          When to stop the ranks of an attempt, for which reason, and when an agent
                          that does not answer is lost
    drain_monitor.py      Learn while ranks train that their nodes are drained
    hang.py               Examine all ranks when one is silent for longer than its steps explain;
                          end the run for a certain hang
    hang_verdict.py       What each silent rank was found doing -> which ranks block the others, and
                          whether that is certain
    pace.py               Heartbeats -> whether a rank is silent for longer than its own steps
                          explain
    policy.py             (rule, attempts so far) -> retry in place, retry elsewhere, or give up and
                          why
    quiesce.py            Have all ranks stop after the same step, for a drain or for another number
                          of ranks
    rank_logs.py          What each rank printed, in files of the run folder: rank-N.log, and
                          rank-N.nccl for NCCL's own log
    resize.py             Learn while ranks train that nodes have joined which the run can use
    silences.py           Which agents have not answered for too long
    straggler.py          Each rank's own work in a step, and its pauses -> the ranks that slow the
                          others, step after step
    supervisor.py         Hear all ranks until each has ended; stop the others once one has failed
"""
