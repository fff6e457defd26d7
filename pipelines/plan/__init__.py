"""From the raw input to the durable plan of every shard."""
