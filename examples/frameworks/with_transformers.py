"""Hugging Face Trainer: `get_train_dataloader` returns the stream."""

import transformers
from my_model import loss_of, make_model

import shardset
from shardset.adapters.torch import TensorStream


class StreamTrainer(transformers.Trainer):
    def get_train_dataloader(self):
        where = {"rank": self.args.process_index, "world_size": self.args.world_size}
        return TensorStream(
            shardset.Stream("shards", "train", global_batch_size=16, image_size=32, **where)
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return loss_of(model, inputs)


arguments = transformers.TrainingArguments(
    "run", num_train_epochs=2, save_strategy="no", report_to="none"
)
StreamTrainer(make_model(), arguments).train()
