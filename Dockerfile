# An image with Syncline, for CPUs: docker build -t syncline:0.1.0 .
FROM python:3.12-slim

# PyTorch's own index has a build without GPU libraries, which are several GB.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY syncline syncline
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir -c /tmp/constraints.txt . \
    && rm -rf /src/build /tmp/constraints.txt

# Runs are written to /work/runs. Your own models and data go beside them:
#   FROM syncline:0.1.0
#   COPY mymodel.py /work/
WORKDIR /work
CMD ["syncline", "doctor"]
