# Targets: cpu (the default), cuda, demo. Build one with:  docker build --target cuda -t cotuned:cuda .
# One base image serves all: the CUDA target needs no CUDA base image, since CuPy's `ctk` extra brings NVRTC and the
# headers as wheels, and the driver comes from the host (docs/adr/0003-one-base-image.md).
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS source
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY wire wire
COPY config config
COPY kernels kernels
COPY client client
COPY service service
# A virtual environment can be copied to another image of the same base whole; compilers stay behind if any are used.
RUN python3 -m venv /opt/cotuned
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

FROM source AS build-cpu
RUN /opt/cotuned/bin/python -m pip install .

FROM source AS build-cuda
RUN /opt/cotuned/bin/python -m pip install '.[cuda13]'

FROM source AS build-demo
RUN /opt/cotuned/bin/python -m pip install '.[demo]'

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="cotuned" \
      org.opencontainers.image.description="Tunes the exploration of discrete Soft Actor-Critic from the executed actions" \
      org.opencontainers.image.licenses="Apache-2.0"
# A fixed number, so that files on volumes keep their owner. The folders exist in the image and belong to the user, so
# that named volumes mounted over them start out writable.
RUN groupadd --gid 10001 cotuned \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin cotuned \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/cotuned /run/cotuned /var/cache/cotuned /out
ENV PATH=/opt/cotuned/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CUPY_CACHE_DIR=/var/cache/cotuned
USER 10001:10001
# The daemon keeps its state below the working directory unless configured otherwise (state.directory).
WORKDIR /var/lib/cotuned
# The cache too: CuPy fails where it cannot write, and `device: auto` would then leave the GPU of a read-only container
# unused.
VOLUME ["/var/lib/cotuned", "/var/cache/cotuned"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["cotuned"]
CMD ["serve"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["cotuned", "status", "--timeout", "2"]

FROM runtime AS demo
COPY --from=build-demo /opt/cotuned /opt/cotuned
COPY examples /opt/examples
ENTRYPOINT ["python3"]
CMD ["/opt/examples/pendulum/demo.py", "--out", "/out"]
HEALTHCHECK NONE

FROM runtime AS cuda
COPY --from=build-cuda /opt/cotuned /opt/cotuned
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime AS cpu
COPY --from=build-cpu /opt/cotuned /opt/cotuned
