# One image for all roles of Clickline: docs/image.md. What is installed is said in image/build.sh.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ARG TORCH_INDEX=
ARG CPU=x86-64-v3
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY image image
COPY src src
RUN TORCH_INDEX=${TORCH_INDEX} image/build.sh install /opt/clickline/venv
RUN CPU=${CPU} image/build.sh kernels /opt/clickline/venv /opt/clickline/kernels

FROM ${PYTHON}
ARG CPU=x86-64-v3
ARG RELEASE=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="clickline" \
      org.opencontainers.image.description="Click-through-rate prediction: from click logs to a live endpoint" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${RELEASE}" \
      org.opencontainers.image.revision="${REVISION}"
# KubeRay's probes call bash, wget and grep; its submitter bash, python and ray.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates wget \
 && rm -rf /var/lib/apt/lists/* \
 # A login shell, as KubeRay may use one, sets PATH anew.
 && echo 'export PATH="/opt/clickline/venv/bin:$PATH"' > /etc/profile.d/clickline.sh
COPY --from=build /opt/clickline /opt/clickline
COPY image/health.sh /opt/clickline/health.sh
# The kernels are code for this CPU and are found only where it has the same name.
# HOME and the rest are places that any user may write to; pods set them to their own volumes.
ENV PATH=/opt/clickline/venv/bin:$PATH \
    CLICKLINE_KERNELS=/opt/clickline/kernels \
    NUMBA_CPU_NAME=${CPU} \
    NUMBA_CPU_FEATURES= \
    NUMBA_CACHE_DIR=/tmp/clickline/kernels \
    HOME=/tmp/clickline \
    USER=clickline \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /clickline
USER 10001:10001
EXPOSE 8500 8501 8502 8600
HEALTHCHECK --interval=30s --timeout=10s --start-period=90s CMD ["/opt/clickline/health.sh"]
# Kubernetes' `args` alone give a command of Clickline; its `command` replaces it, as KubeRay's /bin/bash does.
ENTRYPOINT ["clickline"]
CMD ["--help"]
