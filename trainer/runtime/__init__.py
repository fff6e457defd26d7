"""Devices and processes behind one interface: plain PyTorch, torch.distributed, torch_xla."""
