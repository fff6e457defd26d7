"""What a run leaves: checkpoints, metrics, logs."""
