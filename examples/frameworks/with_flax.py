"""Flax NNX: arrays of the global batch, divided over a mesh."""

import jax
import optax
from flax import nnx
from my_model import loss_of, make_model

import shardset
from shardset.adapters.jax import GlobalBatches

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
stream = shardset.Stream("shards", "train", batch_size=16, image_size=32)
model = make_model()
optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


for _ in range(2):
    for batch in GlobalBatches(stream, mesh):
        loss = train_step(model, optimizer, batch)
