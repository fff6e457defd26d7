# The images of shardset; docs/how-to/clusters.md says how to build and use them. Stages, for `docker build --target`:
#   beam      Beam workers, and the command that submits a build to them
#   dataflow  the same on Dataflow, and the launcher of its flex template
#   trainer   training (the default)
# The ranges in pyproject.toml say which versions pip installs.
FROM apache/beam_python3.11_sdk:2.77.0 AS beam-sdk
FROM gcr.io/dataflow-templates-base/python311-template-launcher-base:20230622_RC00 AS template-launcher

FROM python:3.11.14-slim-bookworm AS source
ENV PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 shardset
WORKDIR /source
COPY setup.py pyproject.toml README.md ./
COPY shardset shardset
COPY pipelines pipelines
COPY trainer trainer

FROM source AS beam
ARG EXTRAS=pipelines
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[${EXTRAS}]" && pip check
COPY --from=beam-sdk /opt/apache/beam /opt/apache/beam
# Otherwise boot would make a virtual environment, in a folder that belongs to root.
ENV RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1
WORKDIR /home/shardset
USER 1000
ENTRYPOINT ["/opt/apache/beam/boot"]

FROM beam AS dataflow
# Dataflow mounts folders of root, into which its launcher and boot write.
# hadolint ignore=DL3002
USER 0
COPY --from=template-launcher /opt/google/dataflow/python_template_launcher /opt/google/dataflow/
WORKDIR /template
RUN echo "import sys; from pipelines.template import launch; sys.exit(launch(sys.argv[1:]))" > main.py
ENV FLEX_TEMPLATE_PYTHON_PY_FILE=/template/main.py

FROM source AS trainer
ARG EXTRAS=trainer
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[${EXTRAS}]" && pip check
WORKDIR /home/shardset
USER 1000
ENTRYPOINT ["python", "-m"]
CMD ["trainer", "--help"]
