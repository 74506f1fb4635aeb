# Everything sets itself up: .venv is made once, and again when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
VLLM_DIR ?= .vllm
# A block-hash trace for the conversation rows of docs/policies.md; without it there are generated workloads only.
TRACE ?=
SEEDS ?= 2
GRID ?= .grid.json

.PHONY: demo test test-engine lint types docs policies check clean

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "extproc needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing extproc and its tools into $(VENV) (a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed          ## the gateway with three simulated engines on 127.0.0.1:8080
	@exec $(BIN)/extproc demo $(ARGS)

test: $(VENV)/.installed          ## all tests but those against a real vLLM
	@$(BIN)/python -m pytest tests/unit tests/gateway $(ARGS)

test-engine: $(VENV)/.installed   ## against two real vLLM servers on the CPU; installs them into VLLM_DIR (4 GB) once
	@tests/engine/install_vllm.sh $(VLLM_DIR)
	@VLLM_DIR=$(VLLM_DIR) $(BIN)/python -m pytest tests/engine -s $(ARGS)

lint: $(VENV)/.installed
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(VENV)/.installed
	@$(BIN)/mypy

docs: $(VENV)/.installed          ## generated pages
	@$(BIN)/python -m extproc.config.reference
	@$(BIN)/python -m deploy.grafana.dashboard

policies: $(VENV)/.installed      ## docs/policies.md: every policy over the grid (an hour; GRID keeps what is done)
	@$(BIN)/python -m loadtest.grid $(if $(TRACE),--trace $(TRACE)) --seeds $(SEEDS) --out $(GRID)
	@$(BIN)/python -m loadtest.policies_page $(GRID) docs

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
