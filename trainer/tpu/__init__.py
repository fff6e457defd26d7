"""Training on Cloud TPU VMs by gcloud: create, set up, check, train, fetch logs, stop, delete."""
