"""Names of the environment variables that raydist sets for its processes, or reads. (either side)

The variables between an agent and mpirun's child are not here: node/mpi_child.py runs without this
package.
"""

from __future__ import annotations

CACHE = "RAYDIST_CACHE"
"""The folder in which raydist.tools.horovod keeps its builds, for all runs of a user."""
CHANGES = "RAYDIST_CHANGES"
"""Settings that were changed in the run (`raydist set`), and after which steps, as JSON."""
CHECKPOINTS = "RAYDIST_CHECKPOINTS"
"""Where the checkpoints of the run are, if not in the run folder: a folder or a URL."""
HELD_STATES = "RAYDIST_HELD_STATES"
"""The name of the states that the fork server of a rank's node has held while the run had made way.
"""
KEEP_WARM = "RAYDIST_KEEP_WARM_S"
"""The maximum number of seconds that fork servers stay on a node, whatever scale.keep_warm_s is."""
LEDGER = "RAYDIST_LEDGER"
"""The file that records lost and slow nodes."""
NOTIFY_WEBHOOK = "RAYDIST_NOTIFY_WEBHOOK"
"""The URL of notify.webhook, which is a secret."""
NOTIFY = "RAYDIST_NOTIFY_"
"""What the variables of notify.command begin with."""
PYTHONPATH_BEFORE = "RAYDIST_PYTHONPATH_BEFORE"
"""PYTHONPATH as it was before raydist set it for its own process, which runs notify.command."""
RENDEZVOUS_FILE = "RAYDIST_RENDEZVOUS_FILE"
"""init_method=file: the file in which the ranks meet."""
RESUME = "RAYDIST_RESUME"
"""The checkpoint from which a rank resumes; empty: none."""
RUNS = "RAYDIST_RUNS"
"""The folder in which run folders are created."""
RUN_DIR = "RAYDIST_RUN_DIR"
"""The run folder."""
SCRATCH = "RAYDIST_SCRATCH"
"""The folder of the node's agents, on its own disk; the ranks of a node share it."""
