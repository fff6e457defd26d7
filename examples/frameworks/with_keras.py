"""Keras: a generator over the stream, in one process; run it again to resume.

An epoch of Keras is any number of steps, after which it saves; the stream goes from one of its own
epochs to the next.
"""

from pathlib import Path

import keras
from my_model import make_model

import shardset

STEPS_PER_EPOCH, NUM_EPOCHS = 2, 3

stream = shardset.Stream("shards", "train", batch_size=16, image_size=32)
saved = sorted(Path("checkpoints").glob("*.keras"))
model = keras.models.load_model(saved[-1]) if saved else make_model()
num_done = int(saved[-1].stem) if saved else 0


def batches():
    start = divmod(num_done * STEPS_PER_EPOCH, len(stream))
    for _, _, batch in stream.epochs(*start):
        yield batch["image"], batch["label"], batch["weight"]


model.fit(
    batches(),
    steps_per_epoch=STEPS_PER_EPOCH,
    initial_epoch=num_done,
    epochs=NUM_EPOCHS,
    callbacks=[keras.callbacks.ModelCheckpoint("checkpoints/{epoch:05d}.keras")],
)
