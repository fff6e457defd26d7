"""What both programs do before anything else."""

import os
import sys
import warnings


def quiet_warnings(*, show: bool) -> None:
    """Keeps warnings of libraries off the terminal, those of processes that this one will start too.

    They name lines of libraries, which tells a user nothing. With `show`, and where Python was told itself what to do
    with warnings (`-W`, PYTHONWARNINGS), all stays as it is.
    """
    if show or sys.warnoptions:
        return
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
