"""The small models, and a model by its `_target_`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raydist.shared.errors import ConfigError
from raydist.training import models


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32), (3, 33)])
def test_small_cnn_takes_images_of_any_size(channels: int, size: int) -> None:
    scores = models.SmallCNN(channels=channels, num_classes=7)(torch.rand(2, channels, size, size))
    assert scores.shape == (2, 7)


def test_mlp_takes_flattened_images() -> None:
    assert models.MLP(inputs=64, hidden=5, num_classes=3)(torch.rand(4, 1, 8, 8)).shape == (4, 3)


def test_build_by_target_with_nested_targets() -> None:
    gelu = {"_target_": "torch.nn.GELU"}
    layer = {
        "_target_": "torch.nn.TransformerEncoderLayer",
        "d_model": 8,
        "nhead": 2,
        "activation": gelu,
    }
    model = models.build_model(layer)
    assert isinstance(model, nn.TransformerEncoderLayer)
    assert isinstance(model.activation, nn.GELU)


def test_arguments_of_the_job_fill_in_missing_settings() -> None:
    cnn = {"_target_": "raydist.training.models.SmallCNN"}
    assert scores(models.build_model(cnn, num_classes=3)) == 3
    assert scores(models.build_model({**cnn, "num_classes": 4}, num_classes=3)) == 4


def scores(model: nn.Module) -> int:
    return int(model(torch.rand(2, 1, 8, 8)).shape[1])


def test_a_model_without_that_argument_is_not_given_it() -> None:
    model = models.build_model(
        {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}, num_classes=10
    )
    assert isinstance(model, nn.Linear)


def test_torchvisions_models_take_the_number_of_classes() -> None:
    model = models.build_model(
        {"_target_": "torchvision.models.squeezenet1_1", "weights": None}, num_classes=3
    )
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize(
    ("settings", "say"),
    [
        ({}, "model=null: it names no class; set model=small_cnn"),
        ({"width": 3}, "names no class"),
        (
            {"_target_": "raydist.training.models.SmalCNN"},
            "raydist.training.models.SmalCNN: it cannot be constructed",
        ),
        ({"_target_": "no.such.thing"}, "no.such.thing: it cannot be constructed"),
        (
            {"_target_": "raydist.training.models.SmallCNN", "widht": 3},
            "unexpected keyword argument 'widht'",
        ),
        ({"_target_": "fractions.Fraction"}, "a Fraction, not a torch.nn.Module"),
    ],
)
def test_what_is_no_model_is_refused(settings: dict[str, object], say: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models.build_model(settings)
    assert say in str(caught.value)
