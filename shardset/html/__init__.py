"""The look of the pages about sets and runs."""
