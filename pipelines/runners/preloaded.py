"""The imports of a worker process, made once: workers are forked from a process that has imported
this.
"""

import gc
from importlib import import_module

gc.disable()  # otherwise collections walk through what Beam's import makes, over and over: 0.3 s
import_module("pipelines.pipeline")
import_module("pipelines.runners.local")
gc.freeze()
gc.enable()
