"""Small models for the jobs: each trains in seconds on a CPU. (rank side)"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from raydist.shared.errors import ConfigError
from raydist.training.export import save_weights as save_weights
from raydist.training.flops import utilization as utilization
from raydist.training.gpt import GPT as GPT
from raydist.training.loss_chunks import chunked_loss as chunked_loss
from raydist.worker.context import samples_per_s as samples_per_s


class MLP(nn.Sequential):
    """A perceptron with one hidden layer.

    Input [B, …] with `inputs` values per sample -> scores [B, num_classes].
    """

    def __init__(self, inputs: int = 64, hidden: int = 64, num_classes: int = 10) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer: images -> scores.

    Images of shape [B, channels, height, width] -> [B, num_classes]. Height and width may be
    anything from 2 pixels. The output is scores, not probabilities.
    """

    def __init__(
        self, channels: int = 1, width: int = 16, num_classes: int = 10, dropout: float = 0.0
    ) -> None:
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
        self.classify = nn.Sequential(
            nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width * 16, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classify(self.features(images))
        return scores


def build_model(settings: Mapping[str, Any], **known: Any) -> nn.Module:
    """Return the model that `model=` names, as `raydist.fit` does without `model`.

    - `settings`: `config.model`, a dict with the class's full name as `_target_` and its arguments.
    - `known`: arguments that the job knows, as `num_classes=10`. They are passed if the model has
      such a parameter; those in `settings` win.

    ConfigError: no class is named, it cannot be imported or constructed, or it is not a
    torch.nn.Module.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import get_object, instantiate

    if "_target_" not in settings:
        examples = ("model=small_cnn", "model=resnet18", "model._target_=a.b.C")
        raise ConfigError.of("model", settings or "null", "it names no class", *examples)
    name = settings["_target_"]
    try:
        parameters = inspect.signature(get_object(name)).parameters
        any_keyword = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        model = instantiate(
            {**{k: v for k, v in known.items() if any_keyword or k in parameters}, **settings}
        )
    except (InstantiationException, ImportError, ValueError) as error:
        raise ConfigError.of(
            "model._target_", name, f"it cannot be constructed: {error.__cause__ or error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError.of(
            "model._target_", name, f"a {type(model).__name__}, not a torch.nn.Module"
        )
    return model
