"""The trainer where torch.compile makes graphs but no kernels, which needs no C++ compiler; as
`python -m trainer`.
"""

import sys

from trainer.cli import main
from trainer.runtime.base import Single

if __name__ == "__main__":
    Single.compile_backend = "aot_eager"
    sys.exit(main())
