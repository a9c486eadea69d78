"""cifar10: 60,000 small photographs of 10 kinds, from files in data.root (nothing is
downloaded)."""

from pathlib import Path

from torch.nn import functional as F
from torchvision import transforms as T
from torchvision.datasets import CIFAR10

import raydist
from raydist import accuracy, data, models

FILES = "cifar-10-batches-py/{data_batch_1,…,data_batch_5,test_batch,batches.meta}"
# Mean and deviation of each colour over the training set.
NORMAL = T.Compose([T.ToTensor(), T.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))])
VARIED = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), NORMAL])


def job(config: raydist.Job) -> dict[str, float]:
    root = Path(config.data.root)
    return raydist.fit(
        config,
        model=models.build_model(config.model, num_classes=10),
        train=data.on_disk(lambda: CIFAR10(root, train=True, transform=VARIED), root, FILES),
        test=data.on_disk(lambda: CIFAR10(root, train=False, transform=NORMAL), root, FILES),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    raydist.main(job)
