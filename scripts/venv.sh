#!/usr/bin/env bash
# Make a virtual environment with this project and some of its extras: venv.sh FOLDER EXTRAS [WHEEL]
#
# WHEEL: a built wheel of this project to install; without it, this checkout is, editable.
# PYTHON: the interpreter (default python3). TORCH, TRITON: the releases where there is no NVIDIA GPU
# (defaults 2.13.0 and the Triton that belongs to TORCH). With a GPU, torch is what pyproject.toml
# admits, a CUDA build, which brings its Triton. Without one it is the CPU build of a few hundred
# megabytes, wherever it can be had.
set -euo pipefail

folder=$1
extras=$2
if [ $# -gt 2 ]; then package=("$3${extras:+[$extras]}"); else package=(-e ".[$extras]"); fi
python=${PYTHON:-python3}
torch=${TORCH:-2.13.0}
case $torch in
  2.11.*) own_triton=3.6.* ;;
  2.12.* | 2.13.*) own_triton=3.7.* ;;
  *) own_triton=3.8.* ;;
esac
triton=${TRITON:-$own_triton}
cpu_index=https://download.pytorch.org/whl/cpu

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "Python 3.10 or newer is needed, $python is $("$python" --version 2>&1): set PYTHON" >&2
  exit 1
fi

echo "Setting up $folder with $("$python" --version), this takes minutes and is done once" >&2
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check -qq)
cd "$(dirname "$0")/.."

if nvidia-smi >/dev/null 2>&1; then
  "${pip[@]}" install "${package[@]}"
  exit
fi

# A version with "+cpu" sorts above the same one without, so pip takes it wherever an index or folder
# that it looks at has it. PyTorch's own index is asked only if it answers: pip would wait for it once
# for each package otherwise.
index=()
if "$folder/bin/python" - "$cpu_index/torch/" <<'PYTHON'; then
import sys
import urllib.request

try:
    urllib.request.urlopen(sys.argv[1], timeout=5).close()
except OSError as error:
    sys.exit(f"{sys.argv[1]} does not answer ({error}); torch comes from pip's usual index")
PYTHON
  index=(--extra-index-url "$cpu_index")
fi
printf 'torch==%s\ntriton==%s\n' "$torch" "$triton" >"$folder/constraints.txt"
"${pip[@]}" install ${index[@]+"${index[@]}"} --constraint "$folder/constraints.txt" "${package[@]}"
