"""folder: your own images, in data.root/train/KIND/*.jpg and data.root/val/KIND/*.jpg (ImageNet's
layout)."""

from pathlib import Path

from torch.nn import functional as F
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

import raydist
from raydist import accuracy, data, models

# Mean and deviation of each colour in ImageNet, which torchvision's weights expect too.
NORMAL = T.Compose([T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])


def job(config: raydist.Job, size: int = 224) -> dict[str, float]:
    root = Path(config.data.root)
    varied = T.Compose([T.RandomResizedCrop(size), T.RandomHorizontalFlip(), NORMAL])
    centred = T.Compose([T.Resize(size * 8 // 7), T.CenterCrop(size), NORMAL])
    train = data.on_disk(lambda: ImageFolder(str(root / "train"), varied), root, "train/KIND/*.jpg")
    test = data.on_disk(lambda: ImageFolder(str(root / "val"), centred), root, "val/KIND/*.jpg")
    if differing := {*train.classes} ^ {*test.classes}:
        first = min(differing)  # a kind is a number: its place in the order of the names
        place = "train/" if first in train.classes else "val/"
        cause = f"train/ and val/ have different kinds: {first} is in {place} only"
        raise raydist.ConfigError.of("data.root", str(root), cause)
    return raydist.fit(
        config,
        model=models.build_model(config.model, num_classes=len(train.classes)),
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    raydist.main(job)
