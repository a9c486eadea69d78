"""Draws from every generator that a fresh interpreter seeds by itself."""

import random

import numpy
import torch

print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())
