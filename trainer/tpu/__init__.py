"""The Cloud TPU API, by gcloud: create, set up, check, train, fetch logs, stop, delete."""
