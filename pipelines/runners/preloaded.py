"""The imports of a process that runs Beam, made once: workers are forked from a process that has
imported this.
"""

import gc
from importlib import import_module

# otherwise collections walk through what Beam's import makes: 0.4 s during it, 0.2 s per worker
gc.disable()
import_module("pipelines.runners.on_beam")
gc.freeze()
gc.enable()
