"""@record of torch.distributed.elastic: the error goes into a file too."""

import os

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    if os.environ["RANK"] == "1":
        raise KeyError("no such layer")


if __name__ == "__main__":
    main()
