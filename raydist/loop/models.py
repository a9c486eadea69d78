"""Small models for the jobs: each trains in seconds on a CPU. (rank side)"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from raydist.errors import ConfigError


class MLP(nn.Sequential):
    """A perceptron over flattened images."""

    def __init__(self, inputs: int = 64, hidden: int = 64, num_classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer over images of any size."""

    def __init__(self, channels: int = 1, width: int = 16, num_classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width * 16, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classify(self.features(images))
        return scores


def build(settings: dict[str, Any], **known: Any) -> nn.Module:
    """The model that `model=` names. `known`: arguments that the job knows, for a model that has them; words win."""
    from hydra.errors import InstantiationException
    from hydra.utils import get_object, instantiate

    if "_target_" not in settings:
        raise ConfigError(
            f"model={settings or 'null'} names no class: say model=small_cnn, model=resnet18 or model._target_=a.b.C"
        )
    name = settings["_target_"]
    try:
        takes = inspect.signature(get_object(name)).parameters
        open_ended = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        model = instantiate({k: v for k, v in known.items() if open_ended or k in takes} | settings)
    except (InstantiationException, ImportError, ValueError) as error:
        raise ConfigError(f"model._target_={name} can't be made: {error.__cause__ or error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={name} is a {type(model).__name__}, not a torch.nn.Module")
    return model
