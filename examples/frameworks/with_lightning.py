"""Lightning: a stream is a loader whose state Lightning saves; run by torchrun or as it is."""

import lightning
import torch
from my_model import loss_of, make_model

import shardset
from shardset.adapters.torch import TensorStream


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def train_dataloader(self):
        where = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        return TensorStream(
            shardset.Stream("shards", "train", global_batch_size=16, image_size=32, **where)
        )

    def training_step(self, batch, number):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    lightning.Trainer(max_epochs=2, devices=2, strategy="ddp").fit(Module())
