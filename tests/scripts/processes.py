"""Everything that starts processes of its own: loader workers, fork, spawn, forkserver, os.fork, a
pool."""

import concurrent.futures
import multiprocessing
import os
import sys
import warnings


class Squares:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index * index


def square(number):
    return number * number


def answer(queue, number):
    queue.put((os.getpid(), square(number)))


def by(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=answer, args=(queue, 7))
    child.start()
    pid, result = queue.get()
    child.join()
    assert pid == child.pid != os.getpid()
    assert child.exitcode == 0
    return result


if __name__ == "__main__":
    from torch.utils.data import DataLoader  # here, so that children start quickly

    method = sys.argv[1]
    seen = sorted(int(n) for batch in DataLoader(Squares(), 2, num_workers=2) for n in batch)
    assert seen == [n * n for n in range(8)], seen
    assert by(method) == 49
    with concurrent.futures.ProcessPoolExecutor(
        2, mp_context=multiprocessing.get_context(method)
    ) as pool:
        assert list(pool.map(square, range(5))) == [0, 1, 4, 9, 16]
    # Python 3.12 and newer warn of a fork in a process with threads; a rank has one.
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    if (pid := os.fork()) == 0:
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    print("all processes answered", method)
