"""Has torch.compile ready: imported by a fork server, before it forks ranks that compile. (rank
side)

Of the first compiled step of a rank, with all code on the disk, this takes more than half.
"""

from raydist.worker import torch_private

torch_private.prepare_compiler()
