# docker build -f docker/cuda.Dockerfile -t tandemrl:cuda .
# docker run --rm --user "$(id -u):$(id -g)" --gpus all --ipc host -v "$PWD/runs:/work/runs" tandemrl:cuda tandemrl train --config gsm8k_tandem
# The wheels of torch and vLLM bring CUDA's libraries; the image needs the compiler only. Never run on a GPU yet.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv
COPY . /src
RUN pip install "/src[vllm,liger,lora,retrieval,hub,wandb,play]" torch==2.13.0 && rm -rf /src \
    && useradd --create-home --uid 10001 tandemrl && mkdir /work && chown tandemrl /work
USER 10001
WORKDIR /work
CMD ["tandemrl", "check"]
