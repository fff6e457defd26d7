"""The trainer with another patience for leases: `python -m tests.makers.impatient BEAT_S PATIENCE_S
train ...`.
"""

import sys
from functools import partial

from trainer import agreement
from trainer.cli import program
from trainer.supervise.run_lock import acquire_run_lock

if __name__ == "__main__":
    beat_s, patience_s = map(float, sys.argv[1:3])
    agreement.acquire_run_lock = partial(acquire_run_lock, beat_s=beat_s, patience_s=patience_s)
    sys.argv[1:] = sys.argv[3:]
    program()
