# GPU image: docker build -t gsa_train . && docker run --gpus all --ipc=host gsa_train make pretrain
FROM python:3.12-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make g++ git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace/gsa_train
COPY . .
# torch from PyPI brings CUDA's libraries along; the driver comes from the host.
RUN make setup
CMD ["make", "pretrain"]
