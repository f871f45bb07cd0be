# `mtp-gguf serve` with the patched llama-server (docs/server.md, "Container").
FROM debian:trixie-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends \
    ca-certificates cmake g++ git make ninja-build python3-dev python3-venv
COPY . /source
# By default for every x86-64 CPU with AVX2; our kernels use AVX-512 where there is any.
ARG CMAKE_ARGS=-DGGML_NATIVE=OFF
RUN python3 -m venv /opt/mtp-gguf && /opt/mtp-gguf/bin/pip install /source
RUN /opt/mtp-gguf/bin/mtp-gguf build-server \
    && cp -r "$(dirname "$(/opt/mtp-gguf/bin/mtp-gguf build-server --where | head -n 1)")" /opt/llama-server

FROM debian:trixie-slim
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home mtp
COPY --from=build /opt/mtp-gguf /opt/mtp-gguf
COPY --from=build /opt/llama-server /opt/llama-server
ENV PATH=/opt/mtp-gguf/bin:$PATH MTP_GGUF_LLAMA_SERVER=/opt/llama-server/llama-server
USER mtp
WORKDIR /models
EXPOSE 8080
# A large model takes minutes to load. The address needs no API key.
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["mtp-gguf", "serve", "--host", "0.0.0.0", "--port", "8080"]
