"""Hugging Face Trainer: its own step count says where the stream begins; run it again to resume."""

import math
from pathlib import Path

import torch
import transformers
from my_model import loss_of, make_model

import shardset
from shardset.adapters.torch import BatchDataset, as_tensors


class Epoch(BatchDataset):
    """The epoch that the Trainer has reached; None for each batch that it drops after a resume."""

    def __init__(self, stream, trainer):
        super().__init__(stream)
        self.trainer = trainer

    def __iter__(self):
        size = self.trainer.args.gradient_accumulation_steps
        updates = math.ceil(len(self) / size)
        epoch, update = divmod(self.trainer.state.global_step, updates)
        yield from [None] * (update * size)
        yield from map(as_tensors, self.stream.epoch(epoch, update * size))


class StreamTrainer(transformers.Trainer):
    def get_train_dataloader(self):
        where = {"rank": self.args.process_index, "world_size": self.args.world_size}
        options = {"global_batch_size": 16, "image_size": 32, **where}
        stream = shardset.Stream("shards", "train", **options)
        return torch.utils.data.DataLoader(Epoch(stream, self), batch_size=None)

    def num_examples(self, dataloader):
        return dataloader.dataset.stream.split.num_samples

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return loss_of(model, inputs)


arguments = transformers.TrainingArguments(
    "run", num_train_epochs=2, gradient_accumulation_steps=2, save_steps=1, report_to="none"
)
trainer = StreamTrainer(make_model(), arguments)
trainer.train(resume_from_checkpoint=any(Path("run").glob("checkpoint-*")))
