#!/bin/bash
# Runs stages of bench/gpu/run.py out of an unpacked bundle: bash run.sh [options] STAGE...   (no stage: says what there is)
# GPU_WORK: folder for sources, build, model and results; what an earlier call left there is used again.
set -eu
bundle=$(cd "$(dirname "$0")" && pwd)
work=${GPU_WORK:-$(dirname "$bundle")/gpu-work}
python=${PYTHON:-python3}
mkdir -p "$work/code"
work=$(cd "$work" && pwd)
tar -xJf "$bundle/code.tar.xz" -C "$work/code"
if ! cmp -s "$bundle/requirements.txt" "$work/site.for"; then
  rm -rf "$work/site"
  "$python" -m pip --disable-pip-version-check install --quiet --no-index --find-links "$bundle/wheels" --no-deps \
    --require-hashes --no-compile --target "$work/site" -r "$bundle/requirements.txt" ||
    { echo "the bundle's wheels do not fit $("$python" --version); pack again with --python" >&2; exit 1; }
  cp "$bundle/requirements.txt" "$work/site.for"
fi
cd "$work/code"
export PYTHONPATH="$work/site:$work/code" PYTHONUNBUFFERED=1
exec "$python" -m bench.gpu.run --bundle "$bundle" --work "$work" "$@"
