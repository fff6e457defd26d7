"""The model, its optimizer and what happens to a batch on the device."""

from trainer.model.airbench import airbench
from trainer.model.build import tiny_resnet
from trainer.model.resnet9 import resnet9

__all__ = ["airbench", "resnet9", "tiny_resnet"]
