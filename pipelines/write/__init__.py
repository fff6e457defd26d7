"""From the plan to tars, indexes and the manifest."""
