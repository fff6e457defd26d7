"""What a set takes to build, keep and read: the verb `plan`."""
