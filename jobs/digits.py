"""digits: scikit-learn's real handwritten digits, 1,797 images of 8x8, inside the package: no
download."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist
from raydist import accuracy


def job(config: raydist.Job, test_size: float = 0.2) -> dict[str, float]:
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        range(len(labels)), test_size=test_size, random_state=0, stratify=labels
    )
    return raydist.fit(
        config,
        train=TensorDataset(images[train], labels[train]),
        test=TensorDataset(images[test], labels[test]),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    raydist.main(job)
