"""Keras: a generator over the stream, in one process."""

from my_model import make_model

import shardset

stream = shardset.Stream("shards", "train", batch_size=16, image_size=32)


def batches():
    while True:
        for batch in stream:
            yield batch["image"], batch["label"], batch["weight"]


make_model().fit(batches(), steps_per_epoch=len(stream), epochs=2)
