"""A folder on a slow file system, by Debian's python3-fusepy.

    /usr/bin/python3 -I slow_folder.py BEHIND FOLDER [HOLD]

FOLDER has the files of BEHIND. Each stat takes 5 ms. While the file HOLD exists, no file can be
created in a folder of a checkpoint, for two minutes at most.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

FUSEPY = "/usr/lib/python3/dist-packages/fusepy.py"
SLOW_FOLDER = Path(__file__)
HELD_S = 120
ATTRIBUTES = (
    "st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid"
)  # fmt: skip


def serve(behind: str, folder: str, hold: str = "") -> None:
    from fusepy import FUSE, FuseOSError, Operations  # type: ignore[import-not-found]

    class Slow(Operations):  # type: ignore[misc]
        def __call__(self, operation: str, path: str, *args: Any) -> Any:
            try:
                return getattr(self, operation)(behind + path, *args)
            except OSError as error:
                raise FuseOSError(error.errno) from error

        def getattr(self, path: str, handle: Any = None) -> dict[str, float]:
            time.sleep(0.005)
            found = os.lstat(path)
            return {name: getattr(found, name) for name in ATTRIBUTES}

        def access(self, path: str, mode: int) -> None:
            if not os.access(path, mode):
                raise FuseOSError(errno.EACCES)

        def create(self, path: str, mode: int, info: Any = None) -> int:
            until = time.monotonic() + HELD_S
            while "step-" in path and os.path.exists(hold) and time.monotonic() < until:
                time.sleep(0.01)
            return os.open(path, os.O_RDWR | os.O_CREAT, mode)

        def open(self, path: str, flags: int) -> int:
            return os.open(path, flags)

        def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
            return os.pread(handle, size, offset)

        def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
            return os.pwrite(handle, data, offset)

        def release(self, path: str, handle: int) -> None:
            os.close(handle)

        def readdir(self, path: str, handle: int) -> list[str]:
            return [".", "..", *os.listdir(path)]

        def rename(self, old: str, new: str) -> None:
            os.rename(old, behind + new)

        def symlink(self, link: str, target: str) -> None:
            os.symlink(target, link)

        def mknod(self, path: str, mode: int, device: int) -> None:
            os.mknod(path, mode, device)

        def mkdir(self, path: str, mode: int) -> None:
            os.mkdir(path, mode)

        def chmod(self, path: str, mode: int) -> None:
            os.chmod(path, mode)

        def truncate(self, path: str, length: int, handle: Any = None) -> None:
            os.truncate(path, length)

        def rmdir(self, path: str) -> None:
            os.rmdir(path)

        def unlink(self, path: str) -> None:
            os.unlink(path)

        def readlink(self, path: str) -> str:
            return os.readlink(path)

        def utimens(self, path: str, times: Any = None) -> None:
            os.utime(path, times)

    options = {"attr_timeout": 0, "entry_timeout": 0}
    FUSE(Slow(), folder, foreground=True, allow_other=True, **options)


if __name__ == "__main__":
    serve(*sys.argv[1:])
