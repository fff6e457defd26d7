"""The side files of other readers, by format. A new one is a module of its own and one line in FORMATS."""

from pipelines.export.base import Format
from pipelines.export.dali import DALI
from pipelines.export.energon import ENERGON
from pipelines.export.hf import HF
from pipelines.export.tfds import TFDS
from pipelines.export.timm import TIMM
from pipelines.export.wids import WIDS

FORMATS: dict[str, Format] = {
    "wids": WIDS,
    "timm": TIMM,
    "energon": ENERGON,
    "dali": DALI,
    "tfds": TFDS,
    "hf": HF,
}
