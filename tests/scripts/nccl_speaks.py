"""A rank in which the real NCCL writes its log, or words that NCCL would write; it prints a line of
its own too."""

import ctypes
import os
import sys
import time

from raydist.node import dryrun

print("the rank's own line")
if sys.argv[1:]:
    with open(os.environ["NCCL_DEBUG_FILE"], "w") as file:
        file.write(" ".join(sys.argv[1:]) + "\n")
    time.sleep(60)  # it is ended long before
else:
    nccl = ctypes.CDLL(dryrun.nccl_library())
    nccl.ncclGetUniqueId(ctypes.create_string_buffer(128))
