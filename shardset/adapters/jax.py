"""A stream as global jax.Arrays over a mesh.

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
for batch in GlobalBatches(stream, mesh):
    # [global batch, ...], divided over "data"
    loss = train_step(params, batch["image"], batch["label"])
"""

from typing import Any

import numpy as np

from shardset.errors import ConfigError, brought_by

with brought_by("jax"):
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from shardset.stream.spec import Batch
    from shardset.stream.stream import Stream, StreamAdapter


class GlobalBatches(StreamAdapter):
    """A stream whose arrays are the global batch, divided over an axis of a mesh; each process
    brings its own part.

    Iterate over it, save and restore it as you do the stream. Lists (keys, stored fields) stay
    those of this process. The axis may be Auto or Explicit. Without jax_enable_x64, JAX holds `id`
    and `label` as 32-bit numbers.

    Raises ConfigError unless the stream's rank and world_size are those of JAX, and the global
    batch divides over an axis of the mesh.
    """

    def __init__(self, stream: Stream, mesh: Mesh, axis: str = "data") -> None:
        here, own = (
            (jax.process_index(), jax.process_count()),
            (stream.spec.rank, stream.spec.world_size),
        )
        if own != here:
            raise ConfigError(
                f"the stream reads for rank {own[0]} of {own[1]}, but this is process {here[0]} of"
                f" {here[1]} of JAX; pass rank=jax.process_index(), world_size=jax.process_count()"
            )
        if axis not in mesh.shape:
            raise ConfigError(
                f"the mesh has no axis {axis!r}, only {', '.join(map(str, mesh.shape))}; name one"
                " of them"
            )
        size = stream.order.global_batch_size
        if size % mesh.shape[axis]:
            raise ConfigError(
                f"a global batch of {size} does not divide over {mesh.shape[axis]} devices of axis"
                f" {axis!r}; use a multiple"
            )
        is_narrow = jax.dtypes.canonicalize_dtype(np.int64) != np.int64
        if is_narrow and stream.split.num_samples > np.iinfo(np.int32).max:
            raise ConfigError(
                f"ids reach {stream.split.num_samples - 1}, more than the 32 bits of JAX hold; set"
                " jax_enable_x64"
            )
        super().__init__(stream)
        self.sharding = NamedSharding(mesh, PartitionSpec(axis))

    def converted(self, batch: Batch) -> dict[str, Any]:
        return {name: self._global(value) for name, value in batch.items()}

    def _global(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        shape = (self.stream.order.global_batch_size, *value.shape[1:])
        return jax.make_array_from_process_local_data(self.sharding, value, shape)
