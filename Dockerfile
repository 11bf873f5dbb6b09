# syntax=docker/dockerfile:1
# One image for agent and controller: the base's Python and a virtual environment that is exactly uv.lock.
#
#   docker build -t gpunode:0.1.0 .
#   buildah bud --build-arg BASE=localhost/base -t gpunode:0.1.0 .
#
# BASE: a Debian with apt, or anything that has /usr/bin/python3 (3.11 or newer) with its venv module.
ARG BASE=debian:12-slim

FROM ${BASE} AS python
ENV DEBIAN_FRONTEND=noninteractive
# Package lists stay in a cache, so the layer holds Python and nothing else.
RUN --mount=type=cache,target=/var/lib/apt/lists --mount=type=cache,target=/var/cache/apt ["apt-get", "update"]
RUN --mount=type=cache,target=/var/lib/apt/lists --mount=type=cache,target=/var/cache/apt \
    ["apt-get", "install", "-y", "--no-install-recommends", "python3", "ca-certificates"]

FROM python AS build
RUN --mount=type=cache,target=/var/lib/apt/lists --mount=type=cache,target=/var/cache/apt \
    ["apt-get", "install", "-y", "--no-install-recommends", "python3-venv"]
# pip and uv bring authorities of their own; the base's may know a company's as well.
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
RUN ["python3", "-m", "venv", "/opt/uv"]
RUN ["/opt/uv/bin/pip", "install", "--no-cache-dir", "--disable-pip-version-check", "uv==0.13.9"]
ENV UV_PROJECT_ENVIRONMENT=/opt/gpunode \
    UV_PYTHON=/usr/bin/python3 \
    UV_PYTHON_DOWNLOADS=never \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1
WORKDIR /src
# Dependencies first: they change less often than the source. uv checks every hash of the lock file.
COPY pyproject.toml uv.lock ./
RUN ["/opt/uv/bin/uv", "sync", "--frozen", "--no-dev", "--no-install-project"]
COPY README.md LICENSE ./
COPY fake_gpus fake_gpus
COPY daemonset daemonset
COPY src src
RUN ["/opt/uv/bin/uv", "sync", "--frozen", "--no-dev", "--no-editable"]
# The file system may be read-only later. The client's generated models are never imported, and are most of its bytes.
RUN ["/opt/gpunode/bin/python", "-m", "compileall", "-q", "-x", "/kubernetes/(aio/)?client/(models|api)/", "/opt/gpunode/lib"]

FROM python
COPY --from=build /opt/gpunode /opt/gpunode
ENV PATH=/opt/gpunode/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# The controller needs no rights on its node; the DaemonSet asks for root for the agent, which does.
USER 65532:65532
ENTRYPOINT ["gpunode"]
