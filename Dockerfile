# The image for DGX and other NVIDIA clusters:  make docker
#
# NVIDIA's PyTorch image has torch, Triton and Transformer Engine built for each other, and the libraries of the fabric. Its
# constraint file (PIP_CONSTRAINT) keeps pip from replacing them. To pin it to the byte, give the digest that your registry
# reports:  make docker DOCKER_BASE=nvcr.io/nvidia/pytorch:26.06-py3@sha256:...
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}

COPY . /opt/nvfp4_train
WORKDIR /opt/nvfp4_train
RUN python -m pip install --no-cache-dir /opt/nvfp4_train

# Nothing needs root. Give the cluster's user ids, so that files on shared disks belong to who started the run.
ARG UID=1000
RUN userdel --remove "$(id --name --user "${UID}")" 2>/dev/null; useradd --create-home --uid "${UID}" trainer
USER ${UID}
WORKDIR /home/trainer
ENTRYPOINT ["python", "-m", "nvfp4_train.pretrain"]
CMD ["--help"]
