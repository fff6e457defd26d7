"""The Python lines of docs/how-to/loop.md and of the adapters in frameworks.md, run in their order
as they stand, with smaller batches and images.

They run in a process of their own: JAX starts threads, which the forks of later tests would not
survive. Those for DALI need another library: tests/peers runs them.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.makers.shardset import jpeg_samples, new_set

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs/how-to" / name for name in ("loop.md", "frameworks.md")]
SMALLER = {
    "gs://bucket/photos": "photos",
    "batch_size=256": "batch_size=16",
    "batch_size=64": "batch_size=4",
    "image_size=224": "image_size=32",
}
CHECKS = """
assert num_samples == 21
assert again.state_dict() == again.state(1, 1)
assert len(np.unique([next(part.epoch(0))["id"] for part in parts])) == 16
assert images_NHWC.shape == (16, 32, 32, 3)
assert sample.id == 17
assert image.shape == (40, 50, 3)
assert [row["is_even"] for row in rows].count(True) == 35
assert state["epoch"] == 0
assert isinstance(batch["image"], jax.Array) and batch["image"].shape == (16, 32, 32, 3)
print("as the page says")
"""


@pytest.mark.slow
def test_the_lines_of_the_page_work(tmp_path):
    samples = {
        "train": jpeg_samples("train", 70, height=40, width=50),
        "val": jpeg_samples("val", 21),
    }
    new_set(samples, tmp_path / "photos")
    text = "".join(page.read_text().partition("## Training frameworks")[0] for page in PAGES)
    lines = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.S))
    for written, run in SMALLER.items():
        assert written in lines
        lines = lines.replace(written, run)
    words = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{lines}{CHECKS}",
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith("as the page says\n"), done.stderr
