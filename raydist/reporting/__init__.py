"""Readers of the event stream: what a person sees of a run in a terminal, a notebook and its files.
(driver)

Gets events, one after the other. Gives a Result, the lines on the terminal, pages about failures. A
reader that raises is dropped: reporting can not break a run.

    advice.py             How a rank ended -> advice for the user
    cell.py               A screen for notebooks: lines that stay, and one line in the cell's output
                          that IPython replaces
    command_time.py       Where the wall time of a command went, from the start of its process to
                          its end
    console.py            Shows a run from its events: a live line in a terminal or a notebook,
                          plain lines elsewhere
    curves.py             Reports -> curves: each step once across attempts, thinned to what a
                          screen can show
    failures.py           Events of a run -> its failures: root cause, cost, times, recovery
    goodput.py            Events of a run -> seconds of its parts: training steps, launch, failures,
                          evaluation, saves, rest
    job_metadata.py       watch.job_metadata=true: writes the result into the metadata of the Ray
                          job, for `ray job list`
    lines.py              A screen of plain lines for logs: no control characters, at a limited rate
    log_link.py           Links the run folder into the folder of Ray's logs, so that Ray's
                          dashboard can read its files
    metrics.py            Figures of a run for Prometheus: Ray's node agents serve them, and its
                          `/api/prometheus/sd` lists those
    notebook.py           The rich form of a Result in a notebook: the summary, and a small curve of
                          each reported value
    output.py             The output of ranks as whole lines, each with its rank
    page.py               The page about a failure: root cause, reason, cost, recovery and advice
    page_files.py         Writes a page for each failure into the run folder: blame-1.txt for
                          people, blame-1.json for programs
    points.py             Reports of rank 0 -> points of a curve: each step once over all attempts,
                          and settled before it is told
    progress.py           Reports of rank 0 -> step, rate, time left
    result.py             Figures: adds up the events of a run. Result: what `raydist.run` returns
    terminal.py           A screen for terminals: lines that stay, and a live line below them
    trace.py              Events of a run -> a trace for Perfetto and chrome://tracing: launch,
                          steps, saves, failures
    wording.py            Texts and tables for the console: plan, launch, summary; raydist's own
                          text is ASCII
"""
