"""The model, its optimizer and what happens to a batch on the device."""

from trainer.model.networks import tiny_resnet

__all__ = ["tiny_resnet"]
