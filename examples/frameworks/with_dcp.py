"""torch.distributed.checkpoint: a stream is a `Stateful`; run it again to train one more epoch."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from my_model import loss_of, make_model

import shardset
from shardset.adapters.torch import TensorStream

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
where: dict = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
stream = shardset.Stream("shards", "train", global_batch_size=16, image_size=32, **where)
saved: dict = {"model": model.state_dict(), "stream": stream}
if Path("checkpoint").exists():
    dcp.load(saved, checkpoint_id="checkpoint")
    model.load_state_dict(saved["model"])

for batch in TensorStream(stream):  # an epoch
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
dcp.save({"model": model.state_dict(), "stream": stream}, checkpoint_id="checkpoint")
dist.destroy_process_group()
