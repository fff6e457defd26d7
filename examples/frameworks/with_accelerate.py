"""Accelerate: the loader stays out of `prepare`; run it again to train one more epoch."""

from pathlib import Path

import accelerate
import torch
from my_model import loss_of, make_model

import shardset
from shardset.adapters.torch import TensorStream

accelerator = accelerate.Accelerator()
where = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
stream = shardset.Stream("shards", "train", global_batch_size=16, image_size=32, **where)
model = make_model()
model, optimizer = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.01)
)  # and no loader
accelerator.register_for_checkpointing(stream)
if Path("checkpoint").exists():
    accelerator.load_state("checkpoint")

for batch in TensorStream(stream):  # an epoch
    tensors = {name: value.to(accelerator.device) for name, value in batch.items()}
    accelerator.backward(loss_of(model, tensors))
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state("checkpoint")
