"""Readers of the event stream: what a person sees of a run. (driver)

Gets events, one after the other. Gives a Result, the lines on the terminal, pages about failures. A reader that raises
is dropped: watching can not break a run.

    advice.py             How a rank ended -> advice for the user
    command_time.py       Where the wall time of a command went, from the start of its process to its end
    console.py            Shows a run from its events: a live bar in a terminal, plain lines elsewhere
    failures.py           Events of a run -> its failures: root cause, cost, times, recovery
    goodput.py            Events of a run -> seconds of its parts: training steps, launch, failures, evaluation, saves,
                          rest
    job_metadata.py       watch.job_metadata=true: writes the result into the metadata of the Ray job, for `ray job
                          list`
    lines.py              A screen of plain lines for logs: no control characters, at a limited rate
    output.py             The output of ranks as whole lines, each with its rank
    page.py               The page about a failure: root cause, reason, cost, recovery and advice
    page_files.py         Writes a page for each failure into the run folder: blame-1.txt for people, blame-1.json for
                          programs
    progress.py           Reports of rank 0 -> step, rate, time left
    result.py             Figures: adds up the events of a run. Result: what `raydist.run` returns
    terminal.py           A screen for terminals: lines that stay, and a live line below them
    wording.py            Texts and tables for the console: plan, launch, summary; raydist's own text is ASCII
"""
