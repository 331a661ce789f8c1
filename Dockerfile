# An image that serves on the CPU:
#   docker build -t openclaw-rl .
#   docker run --rm -p 127.0.0.1:30000:30000 -v openclaw-rl:/data -e SGLANG_API_KEY=me=YOUR_KEY openclaw-rl
# For NVIDIA GPUs, with `--gpus all` to run it:
#   docker build -t openclaw-rl --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:${PYTHON_VERSION}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# bubblewrap confines the programs of a model, in environments and in the coding evaluation.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /constraints.txt
# PyTorch first and alone: its layer is the largest and changes least.
RUN pip install --no-cache-dir -c /constraints.txt --extra-index-url "${TORCH_INDEX}" torch
COPY --from=build /dist /dist
RUN pip install --no-cache-dir -c /constraints.txt /dist/*.whl && rm -r /dist
RUN useradd --create-home --uid 1000 owner && mkdir /data && chown owner /data
USER owner
WORKDIR /data
# What must outlive the container: turns and checkpoints, and the models that were fetched.
ENV RUN_DIR=/data/runs/default OPENCLAW_RL_CACHE=/data/models HF_HOME=/data/huggingface
VOLUME /data
EXPOSE 30000
HEALTHCHECK --interval=30s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/healthz', timeout=4)"]
# Ctrl-C and `docker stop` let running requests finish.
STOPSIGNAL SIGTERM
ENTRYPOINT ["openclaw-rl"]
# Beyond the container, so that a published port reaches it: a start without a key is refused in a sentence.
CMD ["serve", "--preset", "personal", "--proxy-host", "0.0.0.0"]
