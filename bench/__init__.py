"""Figures, each measured side by side in one run: `python -m bench [launch|steps|report|imports]
…`."""
