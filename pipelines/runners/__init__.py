"""Beam's runners: options, local workers, Dataflow, errors, progress."""
