"""Where a run can be followed from elsewhere: its page in a browser, and trackers. (driver)

Gets events of a live run, or the files of a run folder. Gives the page, and what MLflow, W&B and
others are told.

    track.py              track=…: starts a process for each tracker, passes on what it says, and
                          waits for its end
    trackers/             The process that writes to one tracker what the events of a run say: main
                          loop and trackers
    watching.py           What writes and shows the events of a run: records, failure pages,
                          console, page, metrics
    web/                  The page of a run in a browser: served beside a run, from a run folder, or
                          through Ray's dashboard
"""
