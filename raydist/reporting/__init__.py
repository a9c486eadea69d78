"""Readers of the event stream: a run in the terminal, in a notebook and in its files. (driver)

Reads events one by one. Produces a Result, the lines on the terminal, and pages about failures. A
reader cannot break a run: its exception is a warning, and it still gets the next events.

    advice.py             How a rank ended -> advice for the user
    cell.py               A screen for notebooks: lines that stay, and one output line that IPython
                          replaces
    command_time.py       Where the wall time of a command went, from the start of its process to
                          its end
    console.py            Show a run from its events: a live line in a terminal or notebook, else
                          plain lines
    curves.py             Reports -> curves: each step once across attempts, thinned to what a
                          screen can show
    failures.py           Events of a run -> its failures: root cause, cost, times, recovery
    goodput.py            Events of a run -> seconds of steps, launch, failures, evaluation, saves,
                          rest
    job_metadata.py       Write the result into the metadata of the Ray job, which `ray job list`
                          shows
    lines.py              A screen of plain lines for logs: no control characters, at a limited rate
    log_link.py           Link the run folder into Ray's log folder, where Ray's dashboard can read
                          its files
    metrics.py            Figures of a run for Prometheus, served by Ray's node agents
    notebook.py           A Result in a notebook: the summary, and a small curve of each reported
                          value
    output.py             The output of ranks as whole lines, each with its rank
    page.py               The page about a failure: root cause, reason, cost, recovery and advice
    page_files.py         Write a page for each failure into the run folder, as text and as JSON
    points.py             Reports of rank 0 -> points of a curve: each step once over all attempts,
                          and final
    progress.py           Reports of rank 0 -> step, rate, time left
    result.py             Figures: the sums over a run's events. Result: what `raydist.run` returns
    resume_check.py       Compare the first steps after a restart or a resume with what was recorded
                          before
    terminal.py           A screen for terminals: lines that stay, and a live line below them
    trace.py              Events of a run -> a trace for Perfetto: launch, steps, saves, failures
    wording.py            Texts and tables for the console: plan, launch, summary; raydist's own
                          text is ASCII
"""
