"""A stream as global jax.Arrays over a mesh."""

from typing import Any

import numpy as np

from shardset.errors import ConfigError, brought_by

with brought_by("jax"):
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from shardset.stream.spec import Batch
    from shardset.stream.stream import Stream, StreamAdapter


class GlobalBatches(StreamAdapter):
    """A stream whose arrays are the global batch, divided over an axis of a mesh.

    Each process brings its part. Iterate over it and save it like the stream. Arrays become
    jax.Arrays whose first axis is the global batch: `image` uint8 [global batch, size, size, 3],
    `label`, `weight` and `id` [global batch]. Lists (keys, stored fields) hold the samples
    of this process. Without jax_enable_x64, JAX holds `id` and `label` as int32.

    Args:
        stream: The Stream, with `rank=jax.process_index()` and `world_size=jax.process_count()`.
        mesh: The devices. The axis may be Auto or Explicit.
        axis: The name of the axis of the mesh.

    Raises:
        ConfigError: Rank and world size differ from those in JAX, or ids need more than 32 bits.
        ValueError: JAX refuses the axis, or with the first batch a global batch that does not
            divide over it.

    Examples:
        >>> import jax
        >>> import shardset
        >>> from shardset.adapters.jax import GlobalBatches
        >>> axis_types = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=axis_types)
        >>> stream = shardset.Stream("shards", "train", batch_size=8, image_size=32)
        >>> for batch in GlobalBatches(stream, mesh):
        ...     images_NHWC = batch["image"]
        >>> images_NHWC.shape
        (8, 32, 32, 3)
    """

    def __init__(self, stream: Stream, mesh: Mesh, axis: str = "data") -> None:
        here = jax.process_index(), jax.process_count()
        given = stream.spec.rank, stream.spec.world_size
        if given != here:
            raise ConfigError(
                f"the stream reads for rank {given[0]} of {given[1]}, but this is process"
                f" {here[0]} of {here[1]} of JAX; pass rank=jax.process_index(),"
                " world_size=jax.process_count()"
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
        """The batch with global jax.Arrays.

        Args:
            batch: A batch of the stream.
        """
        return {name: self._global(value) for name, value in batch.items()}

    def _global(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        shape = (self.stream.order.global_batch_size, *value.shape[1:])
        return jax.make_array_from_process_local_data(self.sharding, value, shape)
