"""Devices and processes: torch_xla, torch.distributed, one process."""
