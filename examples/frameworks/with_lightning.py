"""Lightning: the module saves the stream's state; run it again, or by torchrun, to resume."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from my_model import loss_of, make_model

import shardset
from shardset.adapters.torch import TensorStream


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.resumed = make_model(), None

    def train_dataloader(self):
        where = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        options = {"global_batch_size": 16, "image_size": 32, **where}
        self.stream = shardset.Stream("shards", "train", **options)
        if self.resumed:
            self.stream.load_state_dict(self.resumed)
        return TensorStream(self.stream)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["stream"] = self.stream.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.resumed = checkpoint["stream"]

    def training_step(self, batch, number):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    saved = ModelCheckpoint("checkpoints", every_n_train_steps=2, save_last=True)
    trainer = lightning.Trainer(max_epochs=2, devices=2, strategy="ddp", callbacks=[saved])
    trainer.fit(Module(), ckpt_path="last")
