# The developer's verbs; CI runs check, test and slow.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
DATA ?= digits
EMULATOR := .tools/bin/fake-gcs-server
EMULATOR_VERSION ?= v1.56.1
STAMP := $(VENV)/.stamp
CHECK := import sys; sys.version_info >= (3, 11) or sys.exit(f'{sys.executable} is Python {sys.version.split()[0]}, \
	expected 3.11 or newer; name one: make PYTHON=python3.11')

.DEFAULT_GOAL := help
.PHONY: help env demo test check fmt fmt-check lint types unit slow nightly emulator azurite flink peers frameworks torch torchtpu flink-up flink-down dataflow docs bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1|/' | column -t -s '|'

env: $(STAMP)  ## create the environment in .venv (about 8 GB: the torch wheel brings CUDA)
$(STAMP): setup.py shardset/version.py
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -c "$(CHECK)"
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet 'uv>=0.13,<1'  # downloads and unpacks 8 GB in parallel
	$(PY) -m uv pip install --quiet --python $(PY) -e '.[pipelines,trainer,xla,export,wandb,dev,docs]'
	@touch $@

demo: env  ## raw images to a trained network in minutes; DATA=cifar10 downloads the real archive
	$(PY) -m examples.demo --data $(DATA)

test: env  ## all tests but the slow ones; gs:// tests run where Go can build the emulator
	@if command -v go >/dev/null; then $(MAKE) --no-print-directory emulator; fi
	$(PY) -m pytest -q -n auto -m "not slow and not nightly$$(test -x $(EMULATOR) || echo ' and not gcs')"

check: env  ## format, lint, types, fast tests
	@$(MAKE) --no-print-directory -j2 --output-sync fmt-check lint types unit

fmt: env  ## format the code
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

fmt-check: env
	$(PY) -m ruff format --check .

lint: env
	$(PY) -m ruff check .

types: env
	$(PY) -m mypy

FAST := tests/test_boundaries.py $(addprefix tests/shardset/,test_checksum.py format order storage html read decode) \
	$(addprefix tests/pipelines/,plan/test_layout.py plan/test_tables.py plan/test_paths.py sources write export) \
	$(addprefix tests/trainer/,test_config.py data model run_folder telemetry)
# Those that start processes or servers, or train, take seconds each.
NOT_FAST := $(addprefix --ignore=tests/,shardset/decode/test_workers.py trainer/telemetry/test_loggers.py \
	trainer/run_folder/test_lock.py \
	trainer/model/test_learner.py trainer/model/test_options.py trainer/data/test_mixture.py) \
	--ignore-glob='tests/shardset/storage/test_gcs_*' --ignore=tests/shardset/storage/test_s3.py
unit: env
	$(PY) -m pytest -q -n auto -m "not slow and not nightly and not gcs" $(FAST) $(NOT_FAST)

slow: env emulator  ## the slow suites: kills, damage, strategies, README commands
	$(PY) -m pytest -q -n auto -m "slow and not nightly"

nightly: env emulator azurite flink peers frameworks torch torchtpu  ## Flink, other readers, notebooks, browsers, benchmarks, long waits, TorchTPU, the trainer with the newest torch
	$(PY) -m pytest -q -n auto -m nightly
	.tools/torch-venv/bin/python -m pytest -q -n auto -m "not slow and not nightly and not gcs" tests/trainer --ignore=tests/trainer/tpu

emulator: $(EMULATOR)  ## build the GCS emulator fake-gcs-server (needs Go)
$(EMULATOR):
	mkdir -p .tools/bin
	GOBIN=$(CURDIR)/.tools/bin go install github.com/fsouza/fake-gcs-server@$(EMULATOR_VERSION)

azurite: .tools/azurite  ## Azure's emulator (needs npm; 190 MB)
.tools/azurite:
	npm install --silent --no-fund --no-audit --prefix $@ azurite@3.35

flink: env  ## Flink and Beam's runner for it from Maven Central (152 MB, once; needs Java 11 or 17 and Maven)
	$(PY) -m scripts.flink fetch

peers: env  ## other readers and writers (wids, Energon, DALI, MosaicML, ...) for the slow tests (2 GB)
	$(PY) -m scripts.venvs peers

frameworks: env  ## the frameworks of examples/frameworks for the nightly tests (900 MB)
	$(PY) -m scripts.venvs frameworks

torch: env  ## the newest torch that the trainer is tested with, in .tools/torch-venv (5 GB)
	$(PY) -m scripts.venvs torch

torchtpu: torch  ## TorchTPU on top of it, in .tools/torchtpu-venv (840 MB), for the tests that compare with it
	.tools/torch-venv/bin/python -m scripts.venvs torchtpu

flink-up: env  ## start a Flink cluster here: a job manager, two task managers, their Python workers
	$(PY) -m scripts.flink up

flink-down:  ## stop it
	$(PY) -m scripts.flink down

OUTPUT ?= gs://$(BUCKET)/$(SOURCE)
dataflow: env  ## build on Dataflow: PROJECT= REGION= BUCKET= INPUT= SOURCE= [OUTPUT= IMAGE= FLAGS=], see docs/how-to/clusters.md
	$(PY) -m pipelines build --source '$(SOURCE)' --input '$(INPUT)' --output '$(OUTPUT)' --runner DataflowRunner \
		--project '$(PROJECT)' --region '$(REGION)' --temp_location 'gs://$(BUCKET)/dataflow' \
		$(if $(IMAGE),--sdk_container_image '$(IMAGE)',--setup_file ./setup.py) $(FLAGS)

docs: env  ## the site, in site/; a broken link fails it
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

bench: env  ## the benchmarks (hours)
	for name in scale stream pod index_rows chaos decoding damage build; do $(PY) -m benchmarks.$$name || exit; done

clean:  ## remove what make made, but not the environment
	rm -rf demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build
