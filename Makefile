# Everything that a fresh machine needs is installed into .venv by the targets themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without a GPU the CPU build of torch is installed; with one, the newest that pyproject allows.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo "-c constraints-cpu.txt")
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test lint serve campaign clean

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(CONSTRAINTS),$(BIN)/python -m pip install --quiet -r constraints-cpu.txt)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e ".[dev,plots]"
	touch $@

demo: $(VENV)/.installed  ## roll out the embedded model over HTTP, show its pictures, write them to demo_out/
	$(BIN)/diffusion-rl demo

test: $(VENV)/.installed  ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

serve: $(VENV)/.installed  ## the rollout service on http://127.0.0.1:30000
	$(BIN)/diffusion-rl serve

campaign: $(VENV)/.installed  ## two thousand refits, most of them faulty, through a real service of each engine
	$(BIN)/python -m benchmarks.refit_campaign --refits 1000
	$(BIN)/python -m benchmarks.refit_campaign --engine llm --refits 1000

clean:
	rm -rf $(VENV) build *.egg-info kernels/*.egg-info
