# extproc, and the simulated engines. Not Envoy: docker-compose.yml takes its own image.
FROM python:3.12-slim AS build
WORKDIR /build
RUN python -m venv /opt/extproc
ENV PATH=/opt/extproc/bin:$PATH
# The dependencies first: they change less often than the code. What this leaves behind must go: setuptools would take the
# empty file from build/ for newer than the real one.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir extproc && touch extproc/__init__.py && \
    pip install --no-cache-dir --disable-pip-version-check . && \
    rm -rf extproc build ./*.egg-info
COPY extproc extproc
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps --force-reinstall .

FROM python:3.12-slim
# 10001 also runs Envoy in docker-compose.yml: both use the sockets and the file in envoy/live.
RUN groupadd --gid 10001 extproc && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /gateway extproc
COPY --from=build /opt/extproc /opt/extproc
ENV PATH=/opt/extproc/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /gateway
COPY extproc.yaml ./
COPY envoy/clusters.yaml envoy/
RUN mkdir -p envoy/live state && chown 10001:10001 envoy/live state
USER 10001:10001
EXPOSE 9902
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9902/livez', timeout=2)"]
CMD ["extproc", "serve", "--config", "extproc.yaml"]
