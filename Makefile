# The developer's verbs; CI runs check, test and slow.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
DATA ?= digits
EMULATOR := .tools/bin/fake-gcs-server
EMULATOR_VERSION ?= v1.56.1
PRISM := .tools/bin/prism
PRISM_VERSION ?= v2.77.0
STAMP := $(VENV)/.stamp
CHECK := import sys; sys.version_info >= (3, 11) or sys.exit(f'{sys.executable} is Python {sys.version.split()[0]}, \
	expected 3.11 or newer; name one: make PYTHON=python3.11')
# Compiling takes 70 s of processor time, five times what it saves the first run; without it, each run would lose 20 s here.
COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode)
# One per Python: .venv-core for python3, .venv-core-python3.13 for PYTHON=python3.13.
CORE := .venv-core$(addprefix -,$(filter-out python3,$(notdir $(PYTHON))))

.DEFAULT_GOAL := help
.PHONY: help env env-core demo test test-core check fmt fmt-check lint types unit coverage slow nightly oldest newest emulator azurite prism flink spark peers frameworks torch torchtpu flink-up flink-down dataflow docs bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1|/' | column -t -s '|'

env: $(STAMP)  ## create the environment in .venv (about 9 GB: the torch wheel brings CUDA)
$(STAMP): pyproject.toml shardset/version.py
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -c "$(CHECK)"
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet 'uv>=0.13,<1'  # downloads and unpacks 9 GB in parallel
	$(PY) -m uv pip install --quiet $(COMPILE) --python $(PY) -e '.[pipelines,trainer,xla,export,wandb,dev,docs]'
	@touch $@

env-core: $(CORE)/.stamp  ## a small environment in .venv-core for the library alone (0.5 GB: no torch, no Beam)
$(CORE)/.stamp: pyproject.toml shardset/version.py
	@$(PYTHON) -c '' 2>/dev/null || { echo "$(PYTHON) does not run here; install it, or name another Python with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c "$(CHECK)"
	$(PYTHON) -m venv --without-pip $(CORE)
	$(PYTHON) -m pip --python $(CORE)/bin/python install --quiet --no-compile --disable-pip-version-check -e '.[test]'
	@touch $@

demo: env  ## raw images to a trained network in minutes; DATA=cifar10 downloads the real archive
	$(PY) -m examples.demo --data $(DATA)

test: env  ## all tests but the slow ones; gs:// tests run where Go can build the emulator
	@if command -v go >/dev/null; then $(MAKE) --no-print-directory emulator; fi
	$(PY) -m pytest -q -n auto -m "not slow and not nightly$$(test -x $(EMULATOR) || echo ' and not gcs')"

# Needs torch, another library of an adapter, or a server.
NOT_CORE := $(addprefix --ignore=tests/,shardset/adapters shardset/decode/test_augment.py \
	shardset/storage/test_served_faults.py shardset/storage/test_s3.py \
	pipelines/sources/test_folder.py pipelines/sources/test_huggingface.py pipelines/sources/test_listing.py) \
	-m "not slow and not nightly and not gcs" -k "not s3 and not torch and not how-to/targets"
test-core: env-core  ## the fast tests of the library, in .venv-core; with another Python: PYTHON=python3.13
	$(CORE)/bin/python -m pytest -q -n auto $(NOT_CORE) tests/shardset

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

FAST := tests/whole/test_boundaries.py $(addprefix tests/shardset/,test_checksum.py format order storage html read decode) \
	$(addprefix tests/pipelines/,plan/test_layout.py plan/test_tables.py plan/test_paths.py sources write export) \
	$(addprefix tests/trainer/,test_config.py data model run_folder telemetry)
# Those that start processes or servers, or train, take seconds each.
NOT_FAST := $(addprefix --ignore=tests/,shardset/decode/test_workers.py trainer/telemetry/test_loggers.py \
	trainer/run_folder/test_lock.py \
	trainer/model/test_learner.py trainer/model/test_learner_options.py trainer/data/test_mixture.py) \
	--ignore-glob='tests/shardset/storage/test_gcs_*' --ignore=tests/shardset/storage/test_s3.py
unit: env
	$(PY) -m pytest -q -n auto -m "not slow and not nightly and not gcs" $(FAST) $(NOT_FAST)

coverage: env  ## how much of each folder the fast tests run
	$(PY) -m pytest -q -n auto -m "not slow and not nightly and not gcs" --cov=shardset --cov=pipelines --cov=trainer --cov-report= $(FAST) $(NOT_FAST)
	@for folder in $(sort $(dir $(wildcard $(foreach depth,/ /*/,$(addsuffix $(depth)__init__.py,shardset pipelines trainer))))); do \
		echo "$$($(PY) -m coverage report --format=total --include="$$folder*") %  $$folder"; done

slow: env emulator  ## the slow suites: kills, damage, strategies, README commands
	$(PY) -m pytest -q -n auto -m "slow and not nightly"

nightly: env emulator azurite prism flink spark peers frameworks torch torchtpu oldest newest  ## Flink, Spark, Prism, other readers, notebooks, browsers, benchmarks, long waits, TorchTPU, the trainer with the newest torch
	$(PY) -m pytest -q -n auto -m nightly
	.tools/torch-venv/bin/python -m pytest -q -n auto -m "not slow and not nightly and not gcs" tests/trainer --ignore=tests/trainer/tpu

oldest: RESOLUTION := lowest-direct
newest: RESOLUTION := highest
oldest newest: env  ## fast tests of the library and the pipelines with the oldest or the newest libraries that pyproject.toml allows
	$(PY) -m uv venv --quiet --clear --python $(PY) .tools/$@-venv
	$(PY) -m uv pip install --quiet --upgrade --resolution $(RESOLUTION) --python .tools/$@-venv -e '.[pipelines,test]'
	.tools/$@-venv/bin/python -m pytest -q -n auto $(NOT_CORE) tests/shardset tests/pipelines/test_build.py $(filter tests/pipelines/%,$(FAST))

emulator: $(EMULATOR)  ## build the GCS emulator fake-gcs-server (needs Go)
$(EMULATOR):
	mkdir -p .tools/bin
	GOBIN=$(CURDIR)/.tools/bin go install github.com/fsouza/fake-gcs-server@$(EMULATOR_VERSION)

azurite: .tools/azurite  ## Azure's emulator (needs npm; 190 MB)
.tools/azurite:
	npm install --silent --no-fund --no-audit --prefix $@ azurite@3.35

flink: env  ## Flink and Beam's runner for it from Maven Central (152 MB, once; needs Java 11 or 17 and Maven)
	$(PY) -m scripts.flink fetch

spark: env  ## Spark and Beam's runner for it from Maven Central (264 MB, once; needs Java 11 or 17 and Maven)
	$(PY) -m scripts.spark

prism: $(PRISM)  ## build Prism, Beam's runner in Go (needs Go)
$(PRISM):
	mkdir -p .tools/bin
	GOBIN=$(CURDIR)/.tools/bin go install github.com/apache/beam/sdks/v2/go/cmd/prism@$(PRISM_VERSION)

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
	rm -rf demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage *.egg-info build
