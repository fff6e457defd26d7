"""How a step becomes a full batch: planned, read, decoded into its slots, finished."""
