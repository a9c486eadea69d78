"""Serve a run's page: next to a run, from its folder, or through Ray's dashboard. (driver)

Folds the events of a run folder. Gives one static page and one stream of changes.
"""
