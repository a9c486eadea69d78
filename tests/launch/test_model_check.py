"""The model that `model=` names is looked at by a real fork server, before anything else is
started."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist import train
from raydist.launch.model_check import ModelCheck
from raydist.settings.compose import compose
from raydist.shared.errors import ConfigError

OWN = """
from torch import nn
class Plain(nn.Linear):
    def __init__(self): super().__init__(2, 2)
class Broken(nn.Module):
    def __init__(self): raise RuntimeError("needs a GPU")
"""
LONG_S = 120.0


def looked_at(*words: str) -> None:
    ModelCheck(compose(["group=inline", *words])).refuse(LONG_S)


def test_a_model_that_cannot_be_divided_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "own.py").write_text("def job(config): ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    small = ("job=gpt", "model.layers=2", "scale=1x4", "data.batch_size=8")
    with pytest.raises(ConfigError, match=r"GPT has 2 blocks .*too few for 4 stages") as refused:
        looked_at(*small, "parallel=pp")
    assert (refused.value.key, refused.value.value, refused.value.suggestion) == (
        "parallel.pp",
        4,
        "parallel.pp=2",
    )
    with pytest.raises(
        ConfigError, match=r"GPT has 2 heads of keys and values, which it does not divide"
    ) as refused:
        looked_at(*small, "parallel=tp")
    assert (refused.value.key, refused.value.value, refused.value.suggestion) == (
        "parallel.tp",
        4,
        "parallel.tp=2",
    )
    with pytest.raises(ConfigError, match=r"no class repeats .* of Plain"):
        looked_at("job=own.py", "model._target_=own_models.Plain", "parallel=fsdp", "scale=1x2")
    for fine in (
        [*small, "parallel=pp", "parallel.pp=2"],
        [*small, "parallel=tp", "parallel.tp=2"],
        [
            "job=own.py",
            "model._target_=own_models.Broken",
            "parallel=fsdp",
            "scale=1x2",
        ],  # not known here: the ranks may have one
        ["job=own.py", "model._target_=own_models.Plain", "scale=1x2"],
    ):
        looked_at(*fine)
    monkeypatch.setattr("raydist.launch.model_check.AT_ONCE_S", LONG_S)
    monkeypatch.setattr("raydist.cluster.connect.connect", None)  # it does not come so far
    assert train.main([*small, "parallel=pp", "group=ray"]) == 2
    assert "error: parallel.pp=4: GPT has 2 blocks" in capsys.readouterr().err
