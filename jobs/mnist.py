"""mnist: 70,000 handwritten digits of 28x28, from files in data.root (nothing is downloaded)."""

from pathlib import Path

from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST

import raydist
from raydist import accuracy, data, models

FILES = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"


def job(config: raydist.Job) -> dict[str, float]:
    return raydist.fit(
        config,
        model=models.build_model(config.model, num_classes=10),
        train=load(config, train=True),
        test=load(config, train=False),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
    )


def load(config: raydist.Job, train: bool) -> TensorDataset:
    """All images in memory, as numbers of mean 0 and deviation 1 (0.1307 and 0.3081 are those of
    the training set)."""
    root = Path(config.data.root)
    files = data.on_disk(lambda: MNIST(root, train=train), root, FILES)
    return TensorDataset(
        files.data.unsqueeze(1).float().div(255).sub(0.1307).div(0.3081), files.targets
    )


if __name__ == "__main__":
    raydist.main(job)
