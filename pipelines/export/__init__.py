"""The verb `export`: side files of other readers, one module a reader. A new one also needs a line in FORMATS."""

from pipelines.export.base import SideFormat
from pipelines.export.energon import ENERGON
from pipelines.export.hf import HF
from pipelines.export.timm import TIMM
from pipelines.export.wids import WIDS

FORMATS: dict[str, SideFormat] = {"wids": WIDS, "timm": TIMM, "energon": ENERGON, "hf": HF}
