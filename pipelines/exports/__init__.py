"""The side files of other readers, by format. A new one is a module of its own and one line in FORMATS."""

from pipelines.exports.base import Format
from pipelines.exports.dali import DALI
from pipelines.exports.energon import ENERGON
from pipelines.exports.hf import HF
from pipelines.exports.tfds import TFDS
from pipelines.exports.timm import TIMM
from pipelines.exports.wids import WIDS

FORMATS: dict[str, Format] = {
    "wids": WIDS,
    "timm": TIMM,
    "energon": ENERGON,
    "dali": DALI,
    "tfds": TFDS,
    "hf": HF,
}
