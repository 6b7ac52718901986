# econmt serve in a container, on a CPU.
#
#   docker build -t econmt .
#   docker run -p 127.0.0.1:5000:5000 -v ./runs/mine:/model:ro econmt
#
# docs/serving.md has more, compose.yaml the same with limits.

FROM python:3.12-slim AS build
# The compiler builds econmt's C library, which the second stage only copies.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/econmt
ENV PATH=/opt/econmt/bin:$PATH PIP_NO_CACHE_DIR=1
# PyTorch's build without CUDA; it changes less often than the code and stays cached.
RUN pip install torch --index-url https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install "/src[serve]" && python -c "from econmt_ops.backends import c; assert c.is_built()"

FROM python:3.12-slim
COPY --from=build /opt/econmt /opt/econmt
RUN useradd --system --create-home --home-dir /var/cache/econmt econmt
USER econmt
ENV PATH=/opt/econmt/bin:$PATH ECONMT_CACHE=/var/cache/econmt PYTHONUNBUFFERED=1
EXPOSE 5000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:5000/health', timeout=5)"]
ENTRYPOINT ["econmt", "serve", "--host", "0.0.0.0", "-m", "/model"]
