"""The page of a run in a browser: served beside a run, from a run folder, or through Ray's
dashboard. (driver)

Gets a run folder, whose events it folds. Gives one static page and one stream of what has changed.
"""
