"""Accelerate: the loader and the scheduler stay out of `prepare`; run it again to resume."""

import contextlib
from pathlib import Path

import accelerate
import torch
from my_model import loss_of, make_model

import shardset
from shardset.adapters.torch import TensorStream

NUM_EPOCHS, ACCUMULATED = 2, 2

accelerator = accelerate.Accelerator()
where = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
stream = shardset.Stream("shards", "train", global_batch_size=16, image_size=32, **where)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)  # a step per update
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(stream, scheduler)
if Path("checkpoint").exists():
    accelerator.load_state("checkpoint")

start_epoch, start_step = stream.load_state_dict(stream.state_dict())
for _ in range(start_epoch, NUM_EPOCHS):
    for step, batch in enumerate(TensorStream(stream), start_step):
        first = step - step % ACCUMULATED
        group = range(first, min(first + ACCUMULATED, len(stream)))  # ends with the epoch
        is_last = step == group[-1]
        tensors = {name: value.to(accelerator.device) for name, value in batch.items()}
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            accelerator.backward(loss_of(model, tensors) / len(group))
        if is_last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            accelerator.save_state("checkpoint")  # after an update; more rarely in your program
    start_step = 0
