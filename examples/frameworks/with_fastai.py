"""fastai: pairs of images and labels, in one process."""

from fastai.data.core import DataLoaders
from fastai.learner import Learner
from my_model import loss_of_labels, make_model

import shardset
from shardset.adapters.torch import TensorStream


class Pairs:
    def __init__(self, split, seed):
        options = {"batch_size": 16, "image_size": 32, "seed": seed, "last_batch": "drop"}
        self.stream = TensorStream(shardset.Stream("shards", split, **options))

    def __len__(self):
        return len(self.stream)

    def __iter__(self):
        for batch in self.stream:
            yield batch["image"], batch["label"]


loaders = DataLoaders(Pairs("train", 0), Pairs("val", None))
Learner(loaders, make_model(), loss_func=loss_of_labels).fit(2, lr=0.01)
