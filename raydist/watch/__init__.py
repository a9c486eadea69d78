"""Follow a run from elsewhere: its page in a browser, and trackers. (driver)

Reads events of a live run, or the files of a run folder. Produces the page, and what is sent to
MLflow, W&B and other trackers.

    notify/               The processes that send messages about a run to a webhook or a command
    operate/              Look into a run and steer it from another process: the driver's part
    track.py              track=…, notify.…: start a process per tracker or receiver, and wait for
                          its end
    trackers/             The process that writes a run's events to one tracker: main loop and
                          trackers
    watching.py           What writes and shows a run's events: records, failure pages, console,
                          page, metrics
    web/                  Serve a run's page: next to a run, from its folder, or through Ray's
                          dashboard
"""
