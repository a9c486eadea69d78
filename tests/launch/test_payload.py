from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import raydist
from raydist.launch.payload import RemoteCall, unpack_all
from raydist.messages.agent import RankValue
from raydist.shared.errors import ConfigError


def test_a_function_is_pickled_with_its_arguments() -> None:
    factor = 3

    def job(x: int, y: int = 0) -> int:
        return factor * x + y

    function, args, kwargs = cloudpickle.loads(RemoteCall.of(job, [2], {"y": 1}).packed)
    assert function(*args, **kwargs) == 7


def test_a_function_that_uses_raydist_is_pickled() -> None:
    def job() -> Any:
        return raydist.rank()

    packed = RemoteCall.of(job, [], {}).packed
    code = (
        "import sys, cloudpickle; print(cloudpickle.loads(sys.stdin.buffer.read())[0]().world_size)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], input=packed, capture_output=True, check=True
        ).stdout
        == b"1\n"
    )


def test_a_function_that_can_not_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def my_job() -> None:
        lock.acquire()

    with pytest.raises(ConfigError, match=r"my_job or one of its arguments can't be pickled.*lock"):
        RemoteCall.of(my_job, [], {})


def test_values_and_exceptions_come_back_by_rank() -> None:
    warnings: list[str] = []
    values, exceptions = unpack_all(
        [
            RankValue(value=cloudpickle.dumps(5)),
            RankValue(),
            RankValue(error=cloudpickle.dumps(ValueError("x"))),
            RankValue(error=b"rubbish"),
            RankValue(value=b"cno_such_module\nThing\n."),
        ],
        warnings.append,
    )
    assert values == (5, None, None, None, None)
    # A run that had finished ended with this error, and no rank's value came back.
    cause = "ModuleNotFoundError: No module named 'no_such_module'"
    assert warnings == [f"what rank 4 returned can't be unpickled here ({cause})"]
    assert list(exceptions) == [2]
    assert isinstance(exceptions[2], ValueError)


def test_an_exception_of_an_unknown_class_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text("class Odd(Exception): pass")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import elsewhere, cloudpickle; "
    code += "sys.stdout.buffer.write(cloudpickle.dumps(elsewhere.Odd('x')))"
    parcel = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert unpack_all([RankValue(error=parcel)], print) == ((None,), {})
