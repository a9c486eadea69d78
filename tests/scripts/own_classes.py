"""Processes of a program's own that send back objects of a class that this file defines."""

import concurrent.futures
import multiprocessing
import sys
from dataclasses import dataclass


@dataclass
class Square:
    root: int
    value: int


def square(number):
    return Square(number, number * number)


class Squares:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return square(index)


def first(batch):
    return batch[0]


def squares(how, method):
    context = multiprocessing.get_context(method)
    if how == "pool":
        with context.Pool(2) as pool:
            return pool.map(square, range(4))
    if how == "executor":
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            return list(pool.map(square, range(4)))
    from torch.utils.data import DataLoader  # here, so that other children start quickly

    return list(
        DataLoader(Squares(), 1, num_workers=2, collate_fn=first, multiprocessing_context=context)
    )


if __name__ == "__main__":
    how, method = sys.argv[1:]
    found = squares(how, method)
    assert all(type(each) is Square for each in found)
    print(f"{how} {method}:", *(each.value for each in found))
