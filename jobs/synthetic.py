"""synthetic: random images made from the seed, of any size: to measure speed, not to learn from."""

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist
from raydist import models


def job(
    config: raydist.Job,
    samples: int = 2048,
    size: int = 32,
    channels: int = 3,
    num_classes: int = 10,
) -> dict[str, float]:
    made = torch.Generator().manual_seed(config.seed)
    images = torch.rand(samples, channels, size, size, generator=made)
    labels = torch.randint(num_classes, (samples,), generator=made)
    return raydist.fit(
        config,
        model=models.build_model(config.model, num_classes=num_classes),
        train=TensorDataset(images, labels),
        loss=F.cross_entropy,
    )


if __name__ == "__main__":
    raydist.main(job)
