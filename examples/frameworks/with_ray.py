"""Ray Train: each worker opens its own stream."""

from pathlib import Path

import ray.train.torch
import torch
from my_model import loss_of, make_model

import shardset
from shardset.adapters.torch import TensorStream


def train(config):
    context = ray.train.get_context()
    where = {"rank": context.get_world_rank(), "world_size": context.get_world_size()}
    stream = shardset.Stream(
        config["shards"], "train", global_batch_size=16, image_size=32, **where
    )
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for batch in TensorStream(stream):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


shards = {"shards": str(Path("shards").resolve())}
workers = ray.train.ScalingConfig(num_workers=2)
ray.train.torch.TorchTrainer(train, train_loop_config=shards, scaling_config=workers).fit()
